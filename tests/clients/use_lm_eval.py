"""lm-eval: a multiple-choice task over log-probabilities, and one over generated text."""

import json
import os
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

work = Path(os.environ["CLIENT_WORK"])
rows = [{"question": f"{n} and {n + 1} is", "choices": [" five", " six"], "answer": n % 2}
        for n in range(4)]  # fmt: skip
(work / "rows.json").write_text("\n".join(map(json.dumps, rows)))
data = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {work / "rows.json"}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
(work / "choice.yaml").write_text(
    f"task: our_choice{data}"
    'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
    "metric_list: [{metric: acc}]\n"
)
(work / "text.yaml").write_text(
    f"task: our_text{data}"
    'output_type: generate_until\ndoc_to_target: "The answer is five."\n'
    'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 40}\n'
    "metric_list: [{metric: exact_match}]\n"
)
(work / "rolling.yaml").write_text(
    f"task: our_rolling{data}"
    'output_type: loglikelihood_rolling\ndoc_to_target: "{{question}}"\n'
    "metric_list: [{metric: word_perplexity}]\n"
)
tokenizer = work / "tokenizer"
PreTrainedTokenizerFast(
    tokenizer_file=os.environ["DEMO_TOKENIZER"],
    bos_token="<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    eos_token="<\uff5cend\u2581of\u2581sentence\uff5c>",
).save_pretrained(tokenizer)
for batch_size in (1, 4):
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny", "base_url": os.environ["BASE_URL"] + "/completions",
            "tokenizer": str(tokenizer), "tokenizer_backend": "huggingface", "num_concurrent": 2,
            "max_retries": 1,
        },
        tasks=["our_choice", "our_text", "our_rolling"],
        task_manager=TaskManager(include_path=str(work)),
        batch_size=batch_size,
        bootstrap_iters=0,
    )  # fmt: skip
    results = found["results"]
    assert results["our_text"]["exact_match,none"] == 1.0, results
    # The scripted engine scores a token by its id alone, so one of the two choices always wins.
    assert results["our_choice"]["acc,none"] == 0.5, results
    assert results["our_rolling"]["word_perplexity,none"] > 1, results
print("ok")
