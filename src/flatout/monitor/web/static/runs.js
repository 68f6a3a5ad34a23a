// The table of runs: found by a word, told apart by state, verdict and last loss, shown alone or beside others.

import * as format from "./format.js";
import { BOUNDS, make } from "./panel.js";

export class RunTable {
  constructor(node, { isShown, open, toggle }) {
    Object.assign(this, { node, isShown, open, toggle, entries: [], most: 4 });
    this.body = node.querySelector("tbody");
    this.search = node.querySelector("input");
    this.search.addEventListener("input", () => this.draw());
    node.addEventListener("toggle", () => node.open && this.search.focus());
  }

  take({ runs, most }) {
    this.entries = runs;
    this.most = most;
    this.node.querySelector(".most").textContent = String(most);
    this.node.querySelector(".number").textContent = String(runs.length);
    this.draw();
  }

  draw() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter((word) => word !== "");
    const isFound = (entry) => words.every((word) => [entry.name, entry.key, entry.command ?? "", entry.ending, BOUNDS[entry.bound] ?? ""].join(" ").toLowerCase().includes(word));
    const found = this.entries.filter(isFound);
    const focused = this.body.contains(document.activeElement) ? [document.activeElement.closest("tr").dataset.key, document.activeElement.className] : null;
    this.body.replaceChildren(...found.map((entry) => this.row(entry)));
    if (found.length === 0) {
      const cell = make("td", this.entries.length === 0 ? "There is no run yet." : "No run has these words.", "none");
      cell.colSpan = 7;
      this.body.append(make("tr"));
      this.body.lastElementChild.append(cell);
    }
    if (focused !== null) [...this.body.rows].find((row) => row.dataset.key === focused[0])?.querySelector(`button.${focused[1]}`)?.focus();
  }

  row(entry) {
    const row = make("tr");
    row.dataset.key = entry.key;
    const isShown = this.isShown(entry.key);
    row.classList.toggle("shown", isShown);
    const name = make("button", entry.name, "name");
    name.type = "button";
    name.addEventListener("click", () => this.open(entry.key));
    const end_s = entry.ended_s ?? entry.last_s;
    const lasted = entry.started_s === undefined || end_s === undefined ? "" : format.duration(end_s - entry.started_s);
    const [state, ...reason] = entry.ending.split(": ");
    const cells = [
      make("td", state, `state ${entry.state} ${state}`),
      make("td", BOUNDS[entry.bound] ?? entry.bound ?? format.UNKNOWN, "verdict-of"),
      make("td", format.plain(entry.loss), "number-of"),
      make("td", entry.started_s === undefined ? "" : format.day(entry.started_s), "when"),
      make("td", lasted, "when"),
    ];
    const beside = make("button", isShown ? "remove" : "compare", "beside");
    beside.type = "button";
    beside.setAttribute("aria-label", `${isShown ? "Remove" : "Compare"} ${entry.name}`);
    const num = this.entries.filter(({ key }) => this.isShown(key)).length;
    beside.disabled = isShown ? num === 1 : num >= this.most;
    beside.addEventListener("click", () => this.toggle(entry.key, !isShown));
    if (reason.length > 0) cells[0].append(make("small", reason.join(": "), "reason"));
    const first = make("td");
    first.append(name);
    if (entry.command) first.append(make("small", entry.command, "command"));
    const last = make("td");
    last.append(beside);
    row.append(first, ...cells, last);
    return row;
  }
}
