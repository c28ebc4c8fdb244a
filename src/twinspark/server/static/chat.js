// The chat: one conversation at a time, replies as they are written. Nothing of it is kept.

import { events } from "./net.js";

const $ = (id) => document.getElementById(id);

/** What was said, and the reply under way; one that was left behind changes its own only. */
class Conversation {
  constructor() {
    this.messages = [];
    this.abort = null;
  }
}

let shown = new Conversation();

function node(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Text with fenced code set apart; nothing is ever taken as markup. */
function show(target, text) {
  const parts = text.split("```");
  target.replaceChildren(...parts.map((part, n) => {
    if (n % 2 === 0) return document.createTextNode(n ? part.replace(/^\n/, "") : part);
    const end = part.indexOf("\n");
    return node("pre", "", end < 0 ? part : part.slice(end + 1).replace(/\n$/, ""));
  }));
}

function follow(change) {
  const turns = $("turns");
  const isAtEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 60;
  change();
  if (isAtEnd) turns.scrollTop = turns.scrollHeight;
}

function addTurn(role, text) {
  const turn = node("div", `turn ${role}`);
  const body = node("div", "text");
  show(body, text);
  turn.append(body);
  $("empty").hidden = true;
  $("turns").append(turn);
  $("turns").scrollTop = $("turns").scrollHeight;
  return turn;
}

/** A reply under way: what came so far, and the nodes that show it. */
class Reply {
  constructor() {
    this.turn = addTurn("assistant", "");
    this.body = this.turn.firstChild;
    this.body.classList.add("cursor");
    this.text = this.thought = "";
    this.calls = [];
    this.frame = 0;
  }

  take(delta) {
    this.text += delta.content ?? "";
    this.thought += delta.reasoning_content ?? delta.reasoning ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= { id: part.id, name: "", arguments: "" });
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    follow(() => {
      if (this.thought) this.drawThought();
      show(this.body, this.text);
      this.calls.forEach((call, n) => this.drawCall(call, n));
    });
  }

  drawThought() {
    if (!this.fold) {
      this.fold = node("details", "thought");
      this.fold.append(node("summary", "", "Thinking"), node("div", "text"));
      this.turn.prepend(this.fold);
    }
    this.fold.lastChild.textContent = this.thought;
    this.fold.firstChild.textContent = this.text ? "Thought" : "Thinking …";
  }

  drawCall(call, n) {
    let box = this.turn.querySelectorAll(".call")[n];
    if (!box) {
      box = node("div", "call");
      box.append(node("b"), node("pre"));
      this.turn.append(box);
    }
    box.firstChild.textContent = call.name;
    box.lastChild.textContent = call.arguments;
  }

  end(figures, error) {
    cancelAnimationFrame(this.frame);
    this.draw();
    this.body.classList.remove("cursor");
    follow(() => {
      if (error) this.turn.append(node("p", "error", error));
      if (figures) this.turn.append(node("p", "foot", figures));
    });
  }
}

function figuresOf(stats, finish) {
  if (!stats) return "";
  const parts = [`${stats.completion_tokens} tokens`];
  if (stats.decode_ms > 0 && stats.decode_tokens) {
    parts.push(`${(1000 * stats.decode_tokens / stats.decode_ms).toFixed(1)} tokens/s`);
  }
  parts.push(`first after ${Math.round(stats.first_token_ms)} ms`);
  if (stats.cached_tokens) parts.push(`${stats.cached_tokens} of the prompt cached`);
  parts.push(`seed ${stats.seed}`);
  if (finish === "length") parts.push("cut at its limit");
  return parts.join(" · ");
}

function bodyOf(messages) {
  const system = $("system").value.trim();
  const body = {
    stream: true,
    stream_options: { include_usage: true },
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
  };
  if ($("effort").value) body.reasoning_effort = $("effort").value;
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  if ($("limit").value) body.max_tokens = Number($("limit").value);
  if ($("seed").value) body.seed = $("seed").value;
  return body;
}

async function ask(text) {
  const own = shown;
  own.messages.push({ role: "user", content: text });
  addTurn("user", text);
  const reply = new Reply();
  own.abort = new AbortController();
  showBusy();
  let stats = null, finish = null, error = "";
  try {
    for await (const event of events("v1/chat/completions", bodyOf(own.messages), own.abort.signal)) {
      stats = event.stats ?? stats;
      for (const choice of event.choices) {
        reply.take(choice.delta);
        finish = choice.finish_reason ?? finish;
      }
    }
  } catch (problem) {
    error = problem.name === "AbortError" ? "stopped" : problem.message;
  }
  own.abort = null;
  if (own !== shown) return; // "New" was pressed: its turns are gone
  reply.end(figuresOf(stats, finish), error);
  if (reply.text || reply.calls.length) {
    own.messages.push({ role: "assistant", content: reply.text, reasoning_content: reply.thought });
  } else {
    own.messages.pop();
  }
  showBusy();
}

function showBusy() {
  $("send").hidden = shown.abort !== null;
  $("stop").hidden = shown.abort === null;
}

function grow() {
  const text = $("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

function submit(event) {
  event?.preventDefault();
  const text = $("text").value.trim();
  if (!text || shown.abort) return;
  $("text").value = "";
  grow();
  ask(text);
}

/** Connect the form. */
export function startChat() {
  $("effort").value = "";
  $("ask").addEventListener("submit", submit);
  $("text").addEventListener("input", grow);
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  $("stop").addEventListener("click", () => shown.abort?.abort());
  $("clear").addEventListener("click", () => {
    shown.abort?.abort();
    shown = new Conversation();
    showBusy();
    $("turns").replaceChildren($("empty"));
    $("empty").hidden = false;
    $("text").focus();
  });
}
