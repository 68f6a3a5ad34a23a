// One run on the page: its verdict, step phases, charts, tables and notes.  Every text that comes from a run
// is set as text, and no markup is ever made from it.

import { CHARTS, Chart, jobGpu, setText } from "./charts.js";
import * as format from "./format.js";
import { Store } from "./store.js";
import { fillGpus, fillProcesses } from "./tables.js";

const PHASES = ["wait", "transfer", "forward", "backward", "optimizer", "rest"];
const PHASE_SPAN_S = 60;
export const BOUNDS = {
  diverged: "loss is NaN or infinite",
  memory: "memory runs out",
  stalled: "stands still",
  throttled: "GPU held down",
  data: "waits for data",
  transfer: "waits for copies",
  host: "waits for the host",
  "idle-gpu": "a GPU is idle",
  compute: "computes",
  healthy: "GPU-bound",
  unknown: "not known",
};

export const make = (name, text, className) => {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className !== undefined) node.className = className;
  return node;
};

export function makeCharts(place, options) {
  return CHARTS.map((spec) => {
    const card = document.getElementById("card").content.firstElementChild.cloneNode(true);
    place.append(card);
    return new Chart(card, spec, options);
  });
}

export class Panel {
  constructor(key, { close, panels, announce, changed }) {
    Object.assign(this, { key, announce, entry: null, bound: null, said: "", isRead: false });
    this.store = new Store();
    this.node = document.getElementById("run").content.firstElementChild.cloneNode(true);
    this.part = (selector) => this.node.querySelector(selector);
    this.part("h2").id = `run-${Math.random().toString(36).slice(2)}`;
    this.node.setAttribute("aria-labelledby", this.part("h2").id);
    this.part(".close").addEventListener("click", () => close(key));
    const { store } = this;
    const source = {
      isOverlay: false,
      lines: (spec) => spec.lines(store).map((line) => ({ ...line, store, start_s: 0 })),
      get end_s() {
        return store.last_s ?? 0;
      },
      sharers: (name) => panels().map((panel) => panel.chart(name)),
    };
    this.charts = makeCharts(this.part(".charts"), { source, group: this.part("h2").id, changed });
    this.makePhases();
  }

  chart(name) {
    return this.charts.find((chart) => chart.spec.name === name);
  }

  get start_s() {
    return this.entry?.started_s ?? this.store.times[0] ?? 0;
  }

  get isOver() {
    const state = this.store.sample?.job?.state;
    return state === "ended" || state === "died" || (this.entry !== null && this.entry.state !== "running");
  }

  close() {
    for (const chart of this.charts) chart.close();
    this.node.remove();
  }

  makePhases() {
    for (const bar of this.node.querySelectorAll(".bar")) bar.append(...PHASES.map((phase) => make("i", "", phase)));
    for (const phase of PHASES) {
      const item = make("li");
      item.append(make("i", "", phase), make("span", phase), make("b"));
      this.part(".step .legend").append(item);
    }
  }

  prepare(range_s) {
    this.showParts(this.store.sample);
    for (const chart of this.charts) chart.prepare(range_s);
  }

  update({ isOverlay }) {
    const { sample } = this.store;
    this.showHead();
    this.showVerdict();
    this.showPhases();
    this.showFacts(sample);
    if (!isOverlay) for (const chart of this.charts) if (!chart.card.hidden) chart.update();
    fillGpus(this.part(".gpus table"), sample?.gpus ?? [], jobGpu(sample));
    fillProcesses(this.part(".processes table"), sample?.processes ?? []);
    this.showNotes();
    this.node.classList.toggle("waiting", sample === null);
    this.node.dataset.rows = String(this.store.times.length);
  }

  redraw() {
    for (const chart of this.charts) chart.redraw();
  }

  get name() {
    return this.entry?.name ?? this.store.sample?.job?.name ?? this.key;
  }

  showHead() {
    const { entry } = this;
    setText(this.part("h2"), this.name);
    const last_s = this.store.last_s;
    const parts = [];
    if (entry !== null) {
      const state = this.store.sample?.job?.state ?? entry.state;
      parts.push(entry.state === "running" ? state : entry.ending);
      if (entry.pid !== undefined) parts.push(`process ${entry.pid}`);
      if (entry.world_size !== undefined) parts.push(`rank ${entry.rank ?? 0} of ${entry.world_size}`);
      if (entry.started_s !== undefined) {
        parts.push(`since ${format.day(entry.started_s)}`);
        if (last_s !== null) parts.push(format.duration((entry.ended_s ?? last_s) - entry.started_s));
      }
    }
    if (this.store.sample === null) parts.push(this.isRead ? "no samples" : "its log is being read");
    setText(this.part(".where"), parts.join(" · "));
    this.part(".close").setAttribute("aria-label", `Close ${this.name}`);
  }

  showVerdict() {
    const [first, ...others] = this.store.verdicts;
    if (first === undefined) return;
    const said = JSON.stringify([this.store.verdicts, this.store.change]);
    if (said === this.said) return;
    this.said = said;
    this.part(".change").hidden = this.store.change === null;
    setText(this.part(".change"), this.store.change ?? "");
    this.part(".verdict").dataset.bound = first.bound;
    setText(this.part(".bound"), BOUNDS[first.bound] ?? first.bound);
    setText(this.part(".sentence"), first.sentence);
    setText(this.part(".action"), first.action);
    const links = (first.rules ?? []).map((code) => Object.assign(make("a", code), { href: `rules/${encodeURIComponent(code)}` }));
    this.part(".rules").replaceChildren(...(links.length > 0 ? [make("span", "rules that find the cause"), ...links] : []));
    this.part(".evidence").replaceChildren(
      ...(first.evidence ?? []).map((text) => make("li", text)),
      ...(first.missing ?? []).filter((text) => !first.sentence.includes(text)).map((text) => make("li", `not known: ${text}`, "missing")),
      ...others.map((other) => make("li", `also: ${other.sentence}`, "also")),
    );
    if (this.bound !== null && this.bound !== first.bound) this.announce(`${this.name}: ${first.sentence}`);
    this.bound = first.bound;
  }

  showPhases() {
    let known = null;
    for (const [kind, selector] of [["phases", ".host"], ["device_phases", ".device"]]) {
      const shares = PHASES.map((phase) => this.store.mean(`job/${kind}/${phase}`, PHASE_SPAN_S));
      const isKnown = shares.some((share) => share !== null);
      const bar = this.part(`${selector} .bar`);
      bar.classList.toggle("unknown", !isKnown);
      [...bar.children].forEach((piece, position) => {
        piece.style.flexGrow = isKnown ? shares[position] ?? 0 : 0;
      });
      const words = PHASES.map((phase, position) => `${phase} ${format.share(shares[position])}`).join(", ");
      bar.setAttribute("aria-label", isKnown ? words : "not known");
      if (isKnown && (known === null || kind === "device_phases")) known = shares;
    }
    this.part(".step .legend").querySelectorAll("b").forEach((cell, position) => setText(cell, format.share(known?.[position])));
  }

  showFacts(sample) {
    const job = sample?.job;
    const host = sample?.host ?? {};
    const facts = [
      ...(job === undefined ? [] : [
        ["Step", format.count(job.steps)],
        ["Time per step", format.seconds(job.step_s)],
        ["Samples", format.perSecond(job.samples_per_s)],
        ["Loss", format.plain(job.loss)],
        ["Learning rate", format.plain(job.learning_rate)],
        ["Energy per step", format.joules(job.energy_per_step_j)],
        ["Energy per sample", format.joules(job.energy_per_sample_j)],
      ]),
      ["Disk read", format.bytesPerSecond(host.disk_read_bytes_per_s)],
      ["Disk written", format.bytesPerSecond(host.disk_write_bytes_per_s)],
      ["Received", format.bytesPerSecond(host.network_received_bytes_per_s)],
      ["Sent", format.bytesPerSecond(host.network_sent_bytes_per_s)],
    ];
    const list = this.part(".facts");
    if (list.children.length !== facts.length) {
      list.replaceChildren(...facts.map(([name]) => {
        const pair = make("div");
        pair.append(make("dt", name), make("dd"));
        return pair;
      }));
    }
    facts.forEach(([name, value], position) => {
      setText(list.children[position].firstElementChild, name);
      setText(list.children[position].lastElementChild, value);
    });
  }

  // What this machine or run does not have takes no room.
  showParts(sample) {
    if (sample === null) return;
    const has = { gpu: (sample.gpus ?? []).length > 0, job: sample.job !== undefined };
    for (const chart of this.charts) chart.card.hidden = chart.spec.needs !== undefined && !has[chart.spec.needs];
    const reason = sample.missing?.gpus;
    this.part(".without").hidden = has.gpu;
    if (!has.gpu) setText(this.part(".without"), `No GPU is shown${reason === undefined ? "." : `: ${reason}`}`);
    this.part(".step").hidden = !has.job;
    this.part(".phase-bar.device").hidden = !has.gpu;
    this.part(".gpus").hidden = !has.gpu;
    this.part(".processes").hidden = (sample.processes ?? []).length === 0;
  }

  showNotes() {
    const { notes } = this.store;
    this.part(".notes").hidden = notes.length === 0;
    const list = this.part(".notes ol");
    const shown = notes.map(({ time_s, text }) => `${format.clock(time_s)} ${text}`);
    if (list.dataset.shown === shown.join("\n")) return;
    list.dataset.shown = shown.join("\n");
    list.replaceChildren(
      ...notes.map(({ time_s, text }) => {
        const item = make("li");
        item.append(make("time", format.clock(time_s)), make("span", text));
        return item;
      }).reverse(),
    );
  }
}
