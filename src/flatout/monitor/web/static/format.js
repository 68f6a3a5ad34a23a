// Quantities as people read them; the same rules as flatout.ground.units.  Unknown is "n/a", never 0.

export const UNKNOWN = "n/a";

function threeDigits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}

// A figure that is no number comes as a name, and is shown as in a terminal.
const NAMES = { nan: "NaN", inf: "infinite", "-inf": "infinite" };
const unless = (value, show) => (value === null || value === undefined ? UNKNOWN : typeof value === "string" ? (NAMES[value] ?? value) : show(value));

export const share = (value) =>
  unless(value, (known) => {
    const percent = known * 100;
    return `${percent.toFixed(percent > 0 && percent < 1 ? 1 : 0)} %`;
  });

export const bytes = (value) =>
  unless(value, (known) => {
    let size = known;
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (Math.abs(size) < 1024) return unit === "B" ? `${size.toFixed(0)} B` : `${threeDigits(size)} ${unit}`;
      size /= 1024;
    }
    return `${threeDigits(size)} TiB`;
  });

// On an axis: 64 GiB, not 64.0 GiB.
export const roundBytes = (value) => bytes(value).replace(/\.0+ /, " ");

export const bytesPerSecond = (value) => unless(value, (known) => `${bytes(known)}/s`);

export const watts = (value) => unless(value, (known) => `${known.toFixed(0)} W`);

export const celsius = (value) => unless(value, (known) => `${known.toFixed(0)} °C`);

export const gigahertz = (value) => unless(value, (known) => `${(known / 1e9).toFixed(2)} GHz`);

export const joules = (value) => unless(value, (known) => (known >= 1 ? `${threeDigits(known)} J` : `${threeDigits(known * 1000)} mJ`));

export const rate = (value) =>
  unless(value, (known) => (known >= 1 || known === 0 ? `${threeDigits(known)} it/s` : `${threeDigits(1 / known)} s/it`));

export const perSecond = (value) => unless(value, (known) => `${threeDigits(known)} /s`);

export const plain = (value) => unless(value, (known) => (known === 0 ? "0" : Number(known.toPrecision(4)).toString()));

export const cores = (value) => unless(value, (known) => known.toFixed(2));

export const count = (value) => unless(value, (known) => known.toLocaleString("en"));

export const seconds = (value) =>
  unless(value, (known) => {
    for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) {
      if (Math.abs(known) >= scale) return `${threeDigits(known / scale)} ${unit}`;
    }
    return known === 0 ? "0 s" : `${threeDigits(known / 1e-9)} ns`;
  });

export const duration = (value) =>
  unless(value, (known) => {
    if (known < 60) return `${Math.max(known, 0).toFixed(0)} s`;
    const minutes = Math.floor(known / 60);
    if (minutes < 60) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  });

const two = (value) => String(value).padStart(2, "0");

export function clock(time_s) {
  const date = new Date(time_s * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function day(time_s) {
  const date = new Date(time_s * 1000);
  const shown = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${shown} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export function elapsed(value) {
  const seconds = Math.max(Math.round(value), 0);
  const minutes = Math.floor(seconds / 60);
  return minutes >= 60 ? `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${two(seconds % 60)}` : `${minutes}:${two(seconds % 60)}`;
}
