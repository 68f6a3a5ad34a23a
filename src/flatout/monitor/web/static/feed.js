// The connection to the server: one stream of events for all the runs that are shown.
//
// The browser itself connects again after a break, with the id of the last event it saw.  Where it gives up
// (the server answered with an error), or where a connection is silently dead, this does so for it.

const SILENT_MS = 25000; // the server says something every ten seconds
const AGAIN_MS = 2000;
const EVENTS = ["runs", "history", "ready", "sample", "beat"];

export class Feed {
  constructor({ hear, tell }) {
    this.hear = hear; // (event name, its document)
    this.tell = tell; // "connecting", "live", "lost" or "refused"
    this.source = null;
    this.lastId = null;
    this.heardAt = performance.now();
    this.lastHeard_s = null; // since the epoch; null: there was no answer yet
    setInterval(() => this.check(), 1000);
  }

  // Other runs: everything about them is sent again.
  open(runs) {
    this.runs = runs;
    this.lastId = null;
    this.connect();
  }

  connect() {
    if (this.source !== null) this.source.close();
    const query = new URLSearchParams(this.runs.map((run) => ["run", run]));
    if (this.lastId !== null) query.set("since", this.lastId);
    const source = new EventSource(`events?${query}`);
    this.source = source;
    this.heardAt = performance.now();
    for (const name of EVENTS) {
      source.addEventListener(name, (event) => {
        if (source !== this.source) return;
        this.heardAt = performance.now();
        this.lastHeard_s = Date.now() / 1000;
        if (event.lastEventId) this.lastId = event.lastEventId;
        this.hear(name, JSON.parse(event.data));
        this.tell("live");
      });
    }
    source.addEventListener("error", () => {
      if (source === this.source) this.tellBreak();
    });
  }

  check() {
    if (this.source === null) return;
    const quiet = performance.now() - this.heardAt;
    const isClosed = this.source.readyState === EventSource.CLOSED;
    if ((isClosed && quiet > AGAIN_MS) || quiet > SILENT_MS) {
      this.tellBreak();
      this.connect();
    }
  }

  tellBreak() {
    if (this.source.readyState === EventSource.CLOSED) this.tell("refused");
    else this.tell(this.lastHeard_s === null ? "connecting" : "lost");
  }
}
