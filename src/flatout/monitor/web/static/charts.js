// The charts: which there are, what each shows, and how it is drawn with uPlot.
//
// A chart has lines, each a figure of some run.  A short window is drawn row by row.  A longer one, and runs
// laid over each other, are drawn in slots of equal length: the mean as a line, and for a line that is alone
// the lowest and the highest as a band.

import * as format from "./format.js";
import { gpuNumber } from "./store.js";

/* global uPlot */

const HEIGHT = 148;
const SHORTEST_S = 60;
const BY_ROWS_S = 600; // so far back the rows are as they were sampled
const NUM_SLOTS = 240;
const MOST_NAMED = 8;
const STALL_S = 30; // a job's figure may be missing for that long: its steps are slow
const SMOOTHING = 0.03; // of the window, to each side
export const PALETTE = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6", "--line-7", "--line-8"];
const BINARY = Array.from({ length: 30 }, (_, power) => 2 ** (20 + power));
const HOUR = 3600;
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, HOUR, 2 * HOUR, 6 * HOUR, 12 * HOUR, 24 * HOUR, 48 * HOUR, 168 * HOUR];

// What the reader chose for every chart of the loss
export const chosen = { log: false, smooth: false };

// Lines of one run

function ofGpus(name) {
  return (store) => {
    const gpus = store.sample?.gpus ?? [];
    return gpus.map((gpu, position) => ({
      path: `gpu/${gpuNumber(gpu)}/${name}`,
      label: `GPU ${gpuNumber(gpu)}`,
      colour: PALETTE[position % PALETTE.length],
    }));
  };
}

const one = (path, label, colour) => () => [{ path, label, colour }];

function memoryLines(store) {
  const gpus = ofGpus("memory_used_bytes")(store);
  if (gpus.length === 1) gpus[0].label = "device";
  const own = [
    { path: "job/reserved_bytes", label: "reserved", colour: "--line-3", dash: [4, 3] },
    { path: "job/allocated_bytes", label: "allocated", colour: "--line-4", dash: [2, 2] },
  ];
  return [...gpus, ...own.filter((line) => store.has(line.path))];
}

// Limits: of the GPU that the job computes on, else of the largest

export function jobGpu(sample) {
  const gpus = sample?.gpus ?? [];
  const index = sample?.job?.gpu_index;
  return gpus.find((gpu) => gpu.index === index && gpu.mig_index === undefined) ?? (gpus.length === 1 ? gpus[0] : null);
}

function gpuLimit(name) {
  return (store) => {
    const gpus = store.sample?.gpus ?? [];
    const limits = gpus.map((gpu) => gpu[name]).filter((limit) => limit !== undefined);
    return jobGpu(store.sample)?.[name] ?? (limits.length > 0 ? Math.max(...limits) : null);
  };
}

// Ranges of the y axis, of what the window shows; runs side by side share them

const wholeShare = () => [0, 1];
const fromZero = (_, high) => [0, high > 0 ? high * 1.08 : 1];
const toLimit = (_, high, limit) => [0, Math.max(high * 1.05, limit) || 1];

function around(low, high) {
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 ? Math.max(low - pad, 0) : low - pad, high + pad];
}

export const CHARTS = [
  {
    name: "utilisation", title: "GPU utilisation", hint: "share of the time in which some kernel ran",
    needs: "gpu", lines: ofGpus("utilisation_share"), show: format.share, range: wholeShare, steps: [0.25, 0.5],
  },
  {
    name: "sm", title: "SM activity", hint: "share of the GPU’s processors at work",
    needs: "gpu", lines: ofGpus("sm_active_share"), show: format.share, range: wholeShare, steps: [0.25, 0.5],
  },
  {
    name: "memory", title: "GPU memory", hint: "of the device, and of PyTorch’s allocator",
    needs: "gpu", lines: memoryLines, show: format.bytes, tick: format.roundBytes, limit: gpuLimit("memory_total_bytes"),
    range: toLimit, steps: BINARY,
  },
  {
    name: "power", title: "Power", hint: "drawn by the board",
    needs: "gpu", lines: ofGpus("power_w"), show: format.watts, limit: gpuLimit("power_limit_w"), range: toLimit,
  },
  {
    name: "rate", title: "Steps", hint: "per second", needs: "job", gap_s: STALL_S,
    lines: one("job/steps_per_s", "steps", "--line-4"), show: format.rate, tick: format.plain, range: fromZero,
  },
  {
    name: "loss", title: "Loss", hint: "as the job reports it", needs: "job", gap_s: STALL_S, hasTools: true,
    lines: one("job/loss", "loss", "--line-4"), show: format.plain, range: around, isBare: true,
  },
  {
    name: "cpu", title: "Host CPU", hint: "share of the cores the job may use",
    lines: one("host/cpu_share", "CPU", "--line-2"), show: format.share, range: wholeShare, steps: [0.25, 0.5],
  },
  {
    name: "ram", title: "Host memory", hint: "of the machine, or of its container",
    lines: one("host/memory_used_bytes", "RAM", "--line-2"), show: format.bytes, tick: format.roundBytes,
    limit: (store) => store.sample?.host?.memory_total_bytes ?? null, range: toLimit, steps: BINARY,
  },
];

// The line of a run that is laid over others: of the GPU it computes on
export function mainLine(spec, store) {
  const lines = spec.lines(store);
  const mine = jobGpu(store.sample);
  return lines.find(({ path }) => mine !== null && path.startsWith(`gpu/${gpuNumber(mine)}/`)) ?? lines[0];
}

// Drawing

const colours = new Map();
const probe = document.body.appendChild(document.createElement("i"));
probe.hidden = true;

export function forgetColours() {
  colours.clear();
}

// A colour of the style sheet as the canvas wants it; the probe resolves which theme is on.
function colour(name) {
  if (!colours.has(name)) {
    probe.style.color = `var(${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}

const faint = (name, strength = 0.13) => colour(name).replace("rgb(", "rgba(").replace(")", `, ${strength})`);

// The mean of the neighbours of each point, so that the curve does not lag behind.
function smooth(values) {
  const reach = Math.max(Math.round(values.length * SMOOTHING), 2);
  return values.map((value, place) => {
    if (value === null || value === undefined) return null;
    const near = values.slice(Math.max(place - reach, 0), place + reach + 1).filter((each) => each !== null && each !== undefined);
    return near.reduce((sum, each) => sum + each, 0) / near.length;
  });
}

// `source` says what there is to draw: `lines(spec)`, each with its store and its start on the axis of time;
// `end_s`, the last moment; `isOverlay`; `sharers(name)`, the charts with the same range.
export class Chart {
  constructor(card, spec, { source, group, changed }) {
    Object.assign(this, { card, spec, source, group, plot: null, drawn: "", cursor: null, lines: [], data: [[]], extent: [Infinity, -Infinity, 0] });
    this.area = card.querySelector(".plot");
    card.querySelector("h3").textContent = spec.title;
    card.querySelector(".hint").textContent = spec.hint;
    card.dataset.chart = spec.name;
    if (spec.hasTools) this.makeTools(changed);
    this.area.addEventListener("keydown", (event) => this.move(event));
    this.area.addEventListener("blur", () => this.plot !== null && leave(this.plot));
    this.watcher = new ResizeObserver(() => this.plot?.setSize({ width: this.area.clientWidth, height: HEIGHT }));
    this.watcher.observe(this.area);
  }

  makeTools(changed) {
    const buttons = Object.keys(chosen).map((name) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: name });
      button.dataset.tool = name;
      button.addEventListener("click", () => {
        chosen[name] = !chosen[name];
        changed();
      });
      return button;
    });
    this.card.querySelector(".tools").append(...buttons);
  }

  close() {
    this.watcher.disconnect();
    this.plot?.destroy();
  }

  // What the window shows, and between which figures; all charts do this before any of them draws.
  prepare(range_s) {
    const { source, spec } = this;
    this.lines = source.lines(spec).filter(({ path, store }) => store.has(path));
    const first_s = Math.min(...this.lines.map(({ store, start_s }) => (store.times[0] ?? Infinity) - start_s), source.end_s);
    this.window = { min: source.end_s - Math.min(range_s, Math.max(source.end_s - first_s, SHORTEST_S)), max: source.end_s };
    const { min, max } = this.window;
    this.isInSlots = source.isOverlay || max - min > BY_ROWS_S;
    this.isSmooth = spec.hasTools === true && chosen.smooth;
    this.hasBand = this.isInSlots && this.lines.length === 1 && !this.isSmooth;
    this.isLog = spec.hasTools === true && chosen.log;
    this.data = this.isInSlots ? this.inSlots(min, max) : this.inRows(min);
    const values = this.data.slice(1).flat().filter((value) => value !== null && (!this.isLog || value > 0));
    const limits = this.lines.map(({ store }) => spec.limit?.(store) ?? 0);
    this.extent = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity), Math.max(0, ...limits)];
  }

  inRows(min) {
    const { store } = this.lines[0] ?? { store: null };
    if (store === null) return [[]];
    const first = Math.max(store.firstRow(min) - 1, 0);
    const found = this.lines.map(({ path }) => store.columns.get(path).slice(first));
    return [store.times.slice(first), ...found.flatMap((values) => (this.isSmooth ? [values, smooth(values)] : [values]))];
  }

  inSlots(min, max) {
    const middles = Array.from({ length: NUM_SLOTS }, (_, slot) => min + ((slot + 0.5) * (max - min)) / NUM_SLOTS);
    const found = this.lines.map(({ path, store, start_s }) => store.slots(path, start_s + min, start_s + max, NUM_SLOTS));
    const sides = this.hasBand ? [found[0].low, found[0].high] : [];
    return [middles, ...found.flatMap(({ mean }) => (this.isSmooth ? [mean, smooth(mean)] : [mean])), ...sides];
  }

  update() {
    const flags = [this.isInSlots, this.isSmooth, this.hasBand, this.isLog].map(Number).join("");
    const drawn = `${flags} ${this.lines.map(({ path, label }) => `${path} ${label}`).join(" ")}`;
    if (drawn !== this.drawn || this.plot === null) this.build(drawn);
    this.plot.batch(() => {
      this.plot.setData(this.data, false);
      this.plot.setScale("x", this.window);
    });
    this.card.classList.toggle("empty", this.lines.length === 0);
    for (const button of this.card.querySelectorAll("[data-tool]")) button.setAttribute("aria-pressed", String(chosen[button.dataset.tool]));
    this.say();
  }

  range() {
    const extents = this.source.sharers(this.spec.name).map((chart) => chart.extent);
    const [low, high, limit] = [0, 1, 2].map((place) => extents.map((extent) => extent[place]));
    const [least, most] = [Math.min(...low), Math.max(...high)];
    if (least > most) return this.isLog ? [0.1, 1] : [0, 1];
    return this.isLog ? [least / 1.15, most * 1.15] : this.spec.range(least, most, Math.max(...limit));
  }

  redraw() {
    this.plot?.redraw(false, true);
  }

  build(drawn) {
    this.plot?.destroy();
    this.drawn = drawn;
    const { spec } = this;
    const font = "12px system-ui, sans-serif";
    const isAlone = this.lines.length === 1;
    const axis = { stroke: () => colour("--soft"), font, ticks: { show: false } };
    const common = (line) => ({
      label: line.label,
      dash: line.dash,
      points: { show: false },
      gaps: (plot, _side, _from, _to, found) => found.filter(([from, to]) => isLong(plot, from, to, spec.gap_s)),
    });
    const series = this.lines.flatMap((line) => {
      const strong = {
        ...common(line),
        stroke: () => colour(line.colour),
        fill: isAlone && !spec.isBare && !this.hasBand ? () => faint(line.colour) : undefined,
        width: this.lines.length > 4 ? 1 : 1.6,
      };
      const pale = { ...common(line), stroke: () => faint(line.colour, 0.35), width: 1 };
      return this.isSmooth ? [pale, { ...strong, fill: undefined }] : [strong];
    });
    const sides = this.hasBand ? [{ points: { show: false } }, { points: { show: false } }] : [];
    this.plot = new uPlot(
      {
        width: this.area.clientWidth,
        height: HEIGHT,
        padding: [8, 6, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, sync: { key: this.group }, points: { show: (plot, number) => (number <= series.length ? undefined : false), size: 6 } },
        scales: { x: { time: !this.source.isOverlay }, y: { distr: this.isLog ? 3 : 1, range: () => this.range() } },
        axes: [
          { ...axis, size: 24, gap: 5, space: timeSpace, incrs: TIMES, grid: { show: false }, values: (...ticks) => timeTicks(this.source.isOverlay, ...ticks) },
          {
            ...axis, size: 62, gap: 6, space: 28, incrs: this.isLog ? undefined : spec.steps,
            grid: { stroke: () => colour("--grid"), width: 1 },
            values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : (spec.tick ?? spec.show)(tick))),
          },
        ],
        series: [{}, ...series, ...sides],
        bands: this.hasBand ? [{ series: [3, 2], fill: () => faint(this.lines[0].colour, 0.22) }] : undefined,
        hooks: { draw: [(plot) => this.drawLimit(plot)], setCursor: [(plot) => this.point(plot.cursor.idx)] },
      },
      [[], ...series.map(() => []), ...sides.map(() => [])],
      this.area,
    );
    this.legend();
  }

  drawLimit(plot) {
    const limit = this.lines.length > 0 ? this.spec.limit?.(this.lines[0].store) : null;
    if (limit === undefined || limit === null || limit > plot.scales.y.max) return;
    const { ctx, bbox } = plot;
    const y = Math.round(plot.valToPos(limit, "y", true)) + 0.5;
    ctx.save();
    ctx.strokeStyle = colour("--limit");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }

  // In the place of the hint; the colours of more GPUs are explained by their table.
  legend() {
    const list = this.card.querySelector(".legend");
    const isShown = this.lines.length > 1 && this.lines.length <= MOST_NAMED;
    this.card.querySelector(".hint").hidden = isShown;
    list.replaceChildren(
      ...(isShown ? this.lines : []).map((line) => {
        const item = document.createElement("li");
        item.style.setProperty("--colour", `var(${line.colour})`);
        item.append(Object.assign(document.createElement("span"), { textContent: line.label }), document.createElement("b"));
        return item;
      }),
    );
  }

  point(row) {
    const known = row ?? null;
    if (known === this.cursor) return;
    this.cursor = known;
    this.say();
  }

  // The figures in words: those under the cursor, else the latest.
  say() {
    const { spec, lines } = this;
    const place = (position) => 1 + position * (this.isSmooth ? 2 : 1);
    const at = (position) => (this.cursor === null ? lines[position].store.latestOf(lines[position].path) : (this.data[place(position)]?.[this.cursor] ?? null));
    const values = lines.map((_, position) => at(position));
    const mine = this.source.isOverlay ? -1 : lines.indexOf(lines.find((line) => line.path === mainLine(spec, line.store)?.path && (jobGpu(line.store.sample) !== null || lines.length === 1)));
    const known = values.filter((value, position) => value !== null && lines[position].path.startsWith("gpu/"));
    const mean = known.length > 0 && !this.source.isOverlay ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
    const shown = this.source.isOverlay ? "" : spec.show(mine >= 0 ? values[mine] : mean);
    const limit = lines.length > 0 ? (spec.limit?.(lines[0].store) ?? null) : null;
    const which = mine < 0 && known.length > 1 && !this.source.isOverlay ? `mean of ${known.length}` : (limit !== null ? `of ${spec.show(limit)}` : "");
    const when = this.cursor === null ? which : this.moment(this.data[0][this.cursor]);
    setText(this.card.querySelector(".value b"), shown);
    setText(this.card.querySelector(".value span"), when);
    this.card.querySelectorAll(".legend b").forEach((cell, position) => {
      setText(cell, position === mine || lines.length > 4 ? "" : spec.show(values[position] ?? null));
    });
    const words = this.source.isOverlay ? lines.map(({ label }, position) => `${label} ${spec.show(values[position])}`).join(", ") : shown;
    this.area.setAttribute("aria-label", `${spec.title}, ${spec.hint}: ${words}${when ? ` ${when}` : ""}`);
  }

  moment(time_s) {
    if (time_s === undefined) return "";
    return this.source.isOverlay ? format.elapsed(time_s) : format.clock(time_s);
  }

  // With the keyboard: left and right move the cursor of all charts of the run.
  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined && event.key !== "Escape") return;
    event.preventDefault();
    const { plot } = this;
    if (event.key === "Escape") {
      leave(plot);
      return;
    }
    const [times] = this.data;
    const row = Math.min(Math.max((this.cursor ?? times.length) + step, 0), times.length - 1);
    plot.setCursor({ left: plot.valToPos(times[row], "x"), top: HEIGHT / 2 }, true, true); // and in all charts
  }
}

function leave(plot) {
  plot.setCursor({ left: -10, top: -10 }, true, true);
}

function isLong(plot, from, to, gap_s = 0) {
  const seconds = plot.posToVal(to / devicePixelRatio, "x") - plot.posToVal(from / devicePixelRatio, "x");
  return Math.abs(seconds) > gap_s;
}

// A short window is labelled with seconds, and those need more room.
const timeSpace = (_plot, _axis, min, max) => (max - min < 240 ? 72 : 54);

function timeTicks(isOverlay, plot, ticks, _axis, _space, apart) {
  const clock = (tick) => (apart >= 24 * HOUR ? format.day(tick).slice(5, 10) : apart >= 60 ? format.clock(tick).slice(0, 5) : format.clock(tick));
  const show = isOverlay ? format.elapsed : clock;
  // At an end it would be cut, or run into the figures of the other axis.
  const width = plot.bbox.width / devicePixelRatio;
  const isInside = (left) => left > 16 && left < width - 16;
  return ticks.map((tick) => (isInside(plot.valToPos(tick, "x")) ? show(tick) : ""));
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
