# codex: a whole turn of an agent over the Responses API: streamed, stateless, with its tools.
set -eu
mkdir -p home
cat > home/config.toml <<TOML
model = "tiny"
model_provider = "ours"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.ours]
name = "ours"
base_url = "$BASE_URL"
wire_api = "responses"
TOML
CODEX_HOME="$PWD/home" codex exec --skip-git-repo-check "Make a file and tell me the answer." \
  > said.txt 2> errors.txt < /dev/null || { cat said.txt errors.txt; exit 1; }
cat said.txt errors.txt
grep -q "The answer is five." said.txt
