// Starts the page: chat, live figures, and which of the two a narrow screen shows.

import { startChat } from "./chat.js";
import { startLive } from "./live.js";

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const other of document.querySelectorAll("nav button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
}
startChat();
startLive();
