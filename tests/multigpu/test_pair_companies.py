"""The oracle of the whole engine on two GPUs: replies are those of requests alone on one."""

import pytest
from tests.demo_companies import ENGINES, compare_companies, engines
from tests.multigpu.pair import DEVICES

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("chosen", ENGINES, ids=["pages", "few pages", "bf16 rows"])
def test_any_company_on_two_ranks_gets_the_replies_of_one_alone(chosen):
    with engines(DEVICES[0], chosen, ranks=2) as (llm, oracle):
        compare_companies(llm, oracle, 12)
