// Requests of the page: its key, JSON, and server-sent events. The key stays in this tab.

const KEY = "twinspark-key";
const CAN_BE_SENT = /^[\x20-\x7e]+$/; // as the server takes keys; fetch throws at some others
let asking = null;

function storedKey() {
  const key = sessionStorage.getItem(KEY);
  return key !== null && CAN_BE_SENT.test(key) ? key : null;
}

function headersWith(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Show the dialog until it holds a key that can be sent, or is closed; whether one was given. */
function openDialog(problem) {
  const dialog = document.getElementById("keydialog");
  const input = document.getElementById("key");
  const say = (text) => (document.getElementById("keyproblem").textContent = text);
  return new Promise((resolve) => {
    const form = dialog.querySelector("form");
    const check = (event) => {
      if (event.submitter?.value === "later") return;
      const key = input.value.trim();
      if (CAN_BE_SENT.test(key)) {
        sessionStorage.setItem(KEY, key);
        return;
      }
      event.preventDefault();
      say(key ? "A key has only letters, digits and signs of ASCII; this one has others." : "No key was written.");
      input.select();
    };
    form.addEventListener("submit", check);
    dialog.addEventListener("close", () => {
      form.removeEventListener("submit", check);
      input.value = "";
      resolve(dialog.returnValue === "use");
    }, { once: true });
    dialog.returnValue = ""; // Escape leaves it as it is
    say(problem);
    dialog.showModal();
  });
}

/**
 * Ask the user for another key than the one that was refused.
 * Resolves to false when the dialog was closed: then nothing is tried until the user acts.
 */
export async function askForKey(refused = storedKey()) {
  const now = storedKey();
  if (now && now !== refused) return true; // another one was given meanwhile
  sessionStorage.removeItem(KEY);
  asking ??= openDialog(refused ? "The server does not know that key." : "").then((isGiven) => {
    asking = null;
    if (isGiven) document.dispatchEvent(new Event("keygiven"));
    return isGiven;
  });
  return asking;
}

/** What an error reply says, in one line. */
async function reason(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the server answered ${reply.status}`;
  }
}

/** GET a JSON document; null when no key was given that the server knows. */
export async function getJson(path) {
  const key = storedKey();
  const reply = await fetch(path, { headers: headersWith(key), cache: "no-store" });
  if (reply.status === 401) return (await askForKey(key)) ? getJson(path) : null;
  if (!reply.ok) throw new Error(await reason(reply));
  return reply.json();
}

/** POST a body and yield the JSON of each event of the reply. */
export async function* events(path, body, signal) {
  let reply;
  for (;;) {
    const key = storedKey();
    reply = await fetch(path, {
      method: "POST", signal, body: JSON.stringify(body),
      headers: { "content-type": "application/json", ...headersWith(key) },
    });
    if (reply.status !== 401 || !(await askForKey(key))) break;
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
