# llm: one streamed and one whole answer, then the chat goes on.
set -eu
export LLM_USER_PATH="$CLIENT_WORK/llm"
mkdir -p "$LLM_USER_PATH"
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<YAML
- model_id: ours
  model_name: tiny
  api_base: "$BASE_URL"
YAML
export OPENAI_API_KEY=none
test "$(llm -m ours 'What is two and three?')" = "The answer is five."
test "$(llm -m ours --no-stream 'What is two and three?')" = "The answer is five."
test "$(llm -m ours -c 'And again?')" = "The answer is five."
echo ok
