// The figures of one run: times, and a column for each figure, in order of time.  A row that stands for many
// samples has the lowest and the highest of them beside it.  A page may stay open for weeks, so the older half
// is merged two by two whenever there are too many rows.

const MOST_ROWS = 4000;
const HOLE_S = 5;
const LONGEST_ROW_S = 3700; // rows of a log of weeks are hours
const MOST_NOTES = 40;
const CHARTED = new Set([
  "host/cpu_share", "host/memory_used_bytes",
  "job/steps_per_s", "job/loss", "job/allocated_bytes", "job/reserved_bytes",
]);
const CHARTED_OF_GPU = ["utilisation_share", "sm_active_share", "memory_used_bytes", "power_w"];

export const gpuNumber = (gpu) => (gpu.mig_index === undefined ? `${gpu.index}` : `${gpu.index}.${gpu.mig_index}`);

export class Store {
  constructor() {
    this.times = [];
    this.columns = new Map();
    this.low = new Map(); // where it is not the figure itself
    this.high = new Map();
    this.sample = null;
    this.verdicts = [];
    this.change = null;
    this.notes = [];
    this.heardAt = null; // by the clock of the page
  }

  get tables() {
    return [this.columns, this.low, this.high];
  }

  takeHistory(message) {
    const times = message.at_s.map((at_s) => message.start_s + at_s);
    if (message.is_whole) {
      this.times = [];
      for (const table of this.tables) table.clear();
      this.notes = [];
    } else if (times.length > 0) {
      this.makeRoom(times[0], times[0]);
    }
    const before = this.times.length;
    this.times.push(...times);
    [message.columns, message.low, message.high].forEach((sent, table) => {
      for (const [path, values] of Object.entries(sent ?? {})) this.column(path, before, this.tables[table]).push(...values);
    });
    this.fill();
    for (const [time_s, text] of message.notes) this.note(time_s, text);
    this.takeLatest(message);
  }

  takeSample(message) {
    const { sample } = message;
    this.makeRoom(sample.time_s, sample.time_s - (sample.span_s ?? 0));
    const before = this.times.length;
    this.times.push(sample.time_s);
    for (const [path, value] of figures(sample)) this.column(path, before).push(value);
    this.fill();
    for (const text of sample.notes ?? []) this.note(sample.time_s, text);
    this.takeLatest(message);
    if (this.times.length > MOST_ROWS) this.thin();
  }

  takeLatest(message) {
    if (message.sample !== null) this.sample = message.sample;
    this.verdicts = message.verdicts;
    this.change = message.change ?? null;
    this.heardAt = performance.now();
  }

  // Rows from `time_s` on are replaced by what comes; a hole before it becomes a gap in every line.
  makeRoom(time_s, start_s) {
    let keep = this.times.length;
    while (keep > 0 && this.times[keep - 1] >= time_s) keep -= 1;
    this.times.length = keep;
    for (const table of this.tables) for (const values of table.values()) values.length = Math.min(values.length, keep);
    const last = this.times[keep - 1];
    if (last !== undefined && start_s - last > HOLE_S) {
      this.times.push((last + start_s) / 2);
      this.fill();
    }
  }

  column(path, length, table = this.columns) {
    let values = table.get(path);
    if (values === undefined) {
      values = [];
      table.set(path, values);
    }
    while (values.length < length) values.push(null);
    return values;
  }

  fill() {
    for (const table of this.tables) for (const path of table.keys()) this.column(path, this.times.length, table);
  }

  thin() {
    const half = MOST_ROWS / 2;
    const merged = (values, merge) => [
      ...Array.from({ length: half / 2 }, (_, pair) => merge(values[2 * pair], values[2 * pair + 1])),
      ...values.slice(half),
    ];
    const known = (merge) => (a, b) => (a === null ? b : b === null ? a : merge(a, b));
    for (const [path, values] of this.columns) {
      const low = this.column(path, this.times.length, this.low).map((value, row) => value ?? values[row]);
      const high = this.column(path, this.times.length, this.high).map((value, row) => value ?? values[row]);
      this.low.set(path, merged(low, known(Math.min)));
      this.high.set(path, merged(high, known(Math.max)));
      this.columns.set(path, merged(values, known((a, b) => (a + b) / 2)));
    }
    this.times = merged(this.times, (_, last) => last);
  }

  // A figure from `from` to `to` as `num` slots of equal length: its mean, lowest and highest in each.
  // A row stands for the time since the row before it.
  slots(path, from, to, num) {
    const values = this.columns.get(path) ?? [];
    const width = (to - from) / num;
    const empty = () => Array.from({ length: num }, () => null);
    const [mean, low, high, weight] = [empty(), empty(), empty(), new Float64Array(num)];
    const slotOf = (time_s) => Math.min(Math.floor((time_s - from) / width), num - 1);
    for (let row = this.firstRow(from); row < this.times.length; row += 1) {
      const value = values[row] ?? null;
      const time_s = this.times[row];
      if (value === null) continue;
      const start_s = Math.max(this.times[row - 1] ?? time_s, time_s - LONGEST_ROW_S, from);
      if (start_s > to) break;
      for (let slot = Math.max(slotOf(start_s), 0); slot <= slotOf(time_s); slot += 1) {
        const left = from + slot * width;
        const part = Math.max(Math.min(time_s, left + width) - Math.max(start_s, left), width * 1e-6);
        mean[slot] = ((mean[slot] ?? 0) * weight[slot] + value * part) / (weight[slot] + part);
        weight[slot] += part;
        low[slot] = Math.min(low[slot] ?? Infinity, this.low.get(path)?.[row] ?? value);
        high[slot] = Math.max(high[slot] ?? -Infinity, this.high.get(path)?.[row] ?? value);
      }
    }
    return { mean, low, high };
  }

  firstRow(time_s) {
    let [row, end] = [0, this.times.length];
    while (row < end) {
      const middle = (row + end) >> 1;
      if (this.times[middle] < time_s) row = middle + 1;
      else end = middle;
    }
    return row;
  }

  note(time_s, text) {
    if (this.notes.some((known) => known.time_s === time_s && known.text === text)) return;
    this.notes.push({ time_s, text });
    this.notes.splice(0, Math.max(this.notes.length - MOST_NOTES, 0));
  }

  get last_s() {
    return this.times.length > 0 ? this.times[this.times.length - 1] : null;
  }

  has(path) {
    return this.columns.get(path)?.some((value) => value !== null) ?? false;
  }

  // The latest value of a figure; a loss that is no number, by its name and not as what it was before.
  latestOf(path) {
    const [group, name] = path.split("/");
    const latest = this.sample?.[group]?.[name];
    if (typeof latest === "string") return latest;
    return this.columns.get(path)?.findLast((value) => value !== null) ?? null;
  }

  // The mean of a figure over the last `span_s`, of the rows that know it.
  mean(path, span_s) {
    const values = this.columns.get(path);
    if (values === undefined) return null;
    let sum = 0;
    let num = 0;
    for (let row = values.length - 1; row >= 0 && this.times[row] > this.last_s - span_s; row -= 1) {
      if (values[row] !== null) {
        sum += values[row];
        num += 1;
      }
    }
    return num > 0 ? sum / num : null;
  }
}

function* figures(sample) {
  for (const group of ["host", "job"]) {
    for (const [name, value] of Object.entries(sample[group] ?? {})) {
      const path = `${group}/${name}`;
      if (CHARTED.has(path) && typeof value === "number") yield [path, value];
    }
  }
  for (const gpu of sample.gpus ?? []) {
    for (const name of CHARTED_OF_GPU) {
      if (typeof gpu[name] === "number") yield [`gpu/${gpuNumber(gpu)}/${name}`, gpu[name]];
    }
  }
  for (const kind of ["phases", "device_phases"]) {
    for (const [phase, value] of Object.entries(sample.job?.[kind] ?? {})) yield [`job/${kind}/${phase}`, value];
  }
}
