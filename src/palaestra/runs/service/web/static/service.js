// Requests to the run service. All of them read; the cookie permits nothing else.

export class ServiceError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export async function read(path, query = {}, signal = undefined) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== null && item !== undefined && item !== "") parameters.append(name, item);
    }
  }
  const text = parameters.toString();
  let response;
  try {
    response = await fetch(text ? `${path}?${text}` : path, { signal, headers: { Accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError(0, "The run service does not answer.");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new ServiceError(response.status, body.error?.text || `The service answered ${response.status}.`);
  }
  return response.json();
}

export const runPath = (runId, rest = "") => `/runs/${encodeURIComponent(runId)}${rest}`;
export const quotePath = (name) => name.split("/").map(encodeURIComponent).join("/");

// Work that belongs to the shown page: it ends when another page is shown, and pauses while the tab is hidden. A browser
// opens only six connections to a host, and tabs in the background must not hold them with streams.
export class PageScope {
  constructor() {
    this.controller = new AbortController();
    this.signal = this.controller.signal;
  }

  get isClosed() {
    return this.signal.aborted;
  }

  close() {
    this.controller.abort();
  }

  read(path, query) {
    return read(path, query, this.signal);
  }

  // Calls `poll` now and then every `seconds`, until it returns false. Failures are shown and retried.
  repeat(seconds, poll) {
    let timer = null, isBusy = false;
    const run = async () => {
      timer = null;
      if (this.isClosed || isBusy || document.hidden) return;
      isBusy = true;
      let goesOn = true;
      try {
        goesOn = (await poll()) !== false;
        showStatus("");
      } catch (error) {
        if (!this.isClosed) showStatus(error.message);
      }
      isBusy = false;
      if (goesOn && !this.isClosed) timer = setTimeout(run, seconds * 1000);
      else stop();
    };
    const resume = () => { if (!document.hidden && timer === null) run(); };
    const stop = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", resume);
    };
    document.addEventListener("visibilitychange", resume);
    this.signal.addEventListener("abort", stop);
    run();
  }

  // Subscribes to an event stream with handlers by event name, while the tab is visible.
  stream(path, handlers) {
    let source = null, timer = null;
    const open = () => {
      timer = null;
      if (this.isClosed || document.hidden || source !== null) return;
      source = new EventSource(path);
      for (const [name, handler] of Object.entries(handlers)) {
        source.addEventListener(name, (event) => handler(JSON.parse(event.data)));
      }
      // The browser reconnects after a broken connection, but not after a refusal.
      source.addEventListener("error", () => {
        if (source !== null && source.readyState === EventSource.CLOSED) {
          shut();
          timer = setTimeout(open, 3000);
        }
      });
    };
    const shut = () => {
      clearTimeout(timer);
      source?.close();
      source = null;
    };
    const change = () => (document.hidden ? shut() : open());
    document.addEventListener("visibilitychange", change);
    this.signal.addEventListener("abort", () => {
      document.removeEventListener("visibilitychange", change);
      shut();
    });
    open();
  }
}

export function showStatus(text) {
  document.getElementById("status").textContent = text;
}
