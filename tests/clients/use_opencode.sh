# opencode: a whole turn of an agent: it offers its tools, runs the call, sends the result back.
set -eu
cat > opencode.json <<JSON
{
  "\$schema": "https://opencode.ai/config.json",
  "autoupdate": false,
  "share": "disabled",
  "permission": {"bash": "allow", "edit": "allow"},
  "provider": {
    "ours": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$BASE_URL", "apiKey": "none"},
      "models": {"tiny": {"name": "tiny", "tool_call": true, "reasoning": true,
                          "limit": {"context": 100000, "output": 8000}}}
    }
  },
  "model": "ours/tiny",
  "small_model": "ours/tiny"
}
JSON
git init -q . 2>/dev/null || true
opencode run "Make a file and tell me the answer." > said.txt 2> errors.txt || { cat said.txt errors.txt; exit 1; }
cat said.txt errors.txt
grep -q "The answer is five." said.txt
