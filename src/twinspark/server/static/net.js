// Requests of the page: its key, JSON, and server-sent events. The key stays in this tab.

const KEY = "twinspark-key";

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Ask the user for a key; resolves when one was given. */
export function askForKey() {
  const dialog = document.getElementById("keydialog");
  return new Promise((resolve) => {
    const done = () => {
      const input = document.getElementById("key");
      if (dialog.returnValue === "use" && input.value) sessionStorage.setItem(KEY, input.value);
      input.value = "";
      resolve();
    };
    dialog.addEventListener("close", done, { once: true });
    if (!dialog.open) dialog.showModal();
  });
}

/** What an error reply says, in one line. */
async function reason(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the server answered ${reply.status}`;
  }
}

/** GET a JSON document; null when a key is missing. */
export async function getJson(path) {
  const reply = await fetch(path, { headers: headers(), cache: "no-store" });
  if (reply.status === 401) return null;
  if (!reply.ok) throw new Error(await reason(reply));
  return reply.json();
}

/** POST a body and yield the JSON of each event of the reply. */
export async function* events(path, body, signal) {
  let reply;
  for (;;) {
    reply = await fetch(path, {
      method: "POST", signal, body: JSON.stringify(body),
      headers: { "content-type": "application/json", ...headers() },
    });
    if (reply.status !== 401) break;
    await askForKey();
  }
  if (!reply.ok) throw new Error(await reason(reply));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      // Seeds have 64 bits, numbers of this language 53: keep them as text.
      const event = JSON.parse(line.slice(6).replace(/"seed":(\d{16,})/, '"seed":"$1"'));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
