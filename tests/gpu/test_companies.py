"""The oracle of the whole engine on a GPU: any company's replies are those of requests alone."""

import pytest
from tests.demo_companies import ENGINES, compare_companies, engines

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("chosen", ENGINES, ids=["pages", "few pages", "bf16 rows"])
def test_any_company_gets_the_replies_it_would_get_alone(chosen):
    """Prompts in pieces beside recorded rounds, arrivals, cancels, drafts, penalties, scores."""
    with engines(DEVICE, chosen) as (llm, oracle):
        counts = compare_companies(llm, oracle, 12)
    assert counts["cuts"], "prompts stood between two layers beside recorded rounds"
    assert counts["hits"] or chosen.get("checkpoint_bytes") == 0


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ENGINES, ids=["pages", "few pages", "bf16 rows"])
def test_many_more_companies(chosen):
    with engines(DEVICE, chosen) as (llm, oracle):
        compare_companies(llm, oracle, 150)
