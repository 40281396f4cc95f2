// Runs in every document before the page's own scripts, as the body of a function.
//
// `settings` holds `seed` (of Math.random), `clipboard` (the session's, so far) and `start` (in seconds since 1970, where
// time is not virtual). A page that is loaded before its episode is known has `reseed`, the name of the event that sets
// the seed; the page's own scripts do not know it. `report(text)` tells the session what was copied; it is undefined in a document that cannot.

// ------------------------------------------------------------------ chance

let state = settings.seed >>> 0;
Math.random = () => {
  state = (state + 0x6d2b79f5) | 0;
  let t = Math.imul(state ^ (state >>> 15), 1 | state);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
};

if (settings.reseed !== null) {
  // The state is the seed plus a constant per number drawn, so this continues as if the seed had been there all along.
  const reseed = (event) => {
    event.stopImmediatePropagation();
    state = (state + event.detail - settings.seed) | 0;
  };
  window.addEventListener(settings.reseed, reseed, { capture: true, once: true });
}

// ------------------------------------------------------------------ time

if (settings.start !== null) {
  const Real = Date;
  const shift = settings.start * 1000 - Real.now();
  const now = () => Real.now() + shift;
  window.Date = new Proxy(Real, {
    construct: (target, given) => (given.length ? new target(...given) : new target(now())),
    apply: () => new Real(now()).toString(),
    get: (target, name) => (name === 'now' ? now : Reflect.get(target, name)),
  });
}

// Virtual time moves in whole microseconds from an arbitrary start: the fraction would differ from run to run.
const preciseNow = Performance.prototype.now;
Performance.prototype.now = function now() {
  return Math.round(preciseNow.call(this));
};

// Input is stamped with the machine's clock, which lies before or after the page's.
const stamps = new WeakMap();
Object.defineProperty(Event.prototype, 'timeStamp', {
  configurable: true,
  enumerable: true,
  get() {
    if (!stamps.has(this)) stamps.set(this, performance.now());
    return stamps.get(this);
  },
});

// Frames are drawn when a picture is wanted. Animations must go on between two of them.
const later = window.setTimeout.bind(window);
let waiting = new Map();
let running = new Map();
let lastRequest = 0;
let isScheduled = false;
const runAnimationFrame = () => {
  isScheduled = false;
  running = waiting;
  waiting = new Map();
  const now = performance.now();
  for (const callback of running.values()) {
    try {
      callback(now);
    } catch (error) {
      window.reportError(error);
    }
  }
};
window.requestAnimationFrame = (callback) => {
  if (typeof callback !== 'function') throw new TypeError('requestAnimationFrame: the callback is not a function');
  if (!isScheduled) later(runAnimationFrame, 16);
  isScheduled = true;
  lastRequest += 1;
  waiting.set(lastRequest, callback);
  return lastRequest;
};
window.cancelAnimationFrame = (request) => {
  waiting.delete(request);
  running.delete(request);
};

// ------------------------------------------------------------------ windows of the system

// There is one window of one size, and no one can answer system dialogs: some of them would stop the page from
// ever being drawn again.
window.open = () => null;
for (const name of ['print', 'moveTo', 'moveBy', 'resizeTo', 'resizeBy']) window[name] = () => {};
const refuse = (owner, ...names) => {
  for (const name of names) {
    if (!owner || !(name in owner)) continue;
    owner[name] = async () => {
      throw new DOMException(`${name} is refused`, 'NotAllowedError');
    };
  }
};
refuse(window, 'showOpenFilePicker', 'showSaveFilePicker', 'showDirectoryPicker');
refuse(Element.prototype, 'requestFullscreen', 'webkitRequestFullscreen', 'requestPointerLock');
refuse(window.MediaDevices?.prototype, 'getDisplayMedia');
refuse(window.EyeDropper?.prototype, 'open');
refuse(window.PaymentRequest?.prototype, 'show');
refuse(window.DocumentPictureInPicture?.prototype, 'requestWindow');
refuse(window.HTMLVideoElement?.prototype, 'requestPictureInPicture');
refuse(window.USB?.prototype, 'requestDevice');
refuse(window.HID?.prototype, 'requestDevice');
refuse(window.Bluetooth?.prototype, 'requestDevice');
refuse(window.Serial?.prototype, 'requestPort');
refuse(window.CredentialsContainer?.prototype, 'get', 'create');

// What would open in a window of its own opens here.
const HERE = new Set(['', '_self', '_parent', '_top']);
const keepHere = (element, attribute) => {
  const name = element?.[attribute] ?? '';
  const isFrame = [...document.querySelectorAll('iframe')].some((frame) => frame.name === name);
  if (!HERE.has(name.toLowerCase()) && !isFrame) element[attribute] = '_self';
};
const linkOf = (event) =>
  event.composedPath().find((one) => one instanceof HTMLAnchorElement || one instanceof HTMLAreaElement);
window.addEventListener('click', (event) => {
  keepHere(linkOf(event), 'target');
  if (linkOf(event) && (event.ctrlKey || event.metaKey || event.shiftKey)) event.preventDefault();
}, true);
window.addEventListener('auxclick', (event) => {
  if (linkOf(event)) event.preventDefault();
}, true);
window.addEventListener('submit', (event) => {
  keepHere(event.target, 'target');
  keepHere(event.submitter, 'formTarget');
}, true);
const { submit } = HTMLFormElement.prototype;
HTMLFormElement.prototype.submit = function () {
  keepHere(this, 'target');
  submit.call(this);
};

// ------------------------------------------------------------------ style

// A native drop-down list is a window of its own, and a page with such a window is never drawn again. So drop-down
// lists are drawn inside the page (`base-select`), as alike to the native ones as a style sheet can make them.
const list = 'select:not([multiple], [size]:not([size=""], [size="0"], [size="1"]))';
const sheet = new CSSStyleSheet();
sheet.replaceSync(`
  *, *::before, *::after { animation: none !important; transition: none !important;
    caret-color: transparent !important; scroll-behavior: auto !important }
  ${list}, ${list}::picker(select) { appearance: base-select !important }
  :where(${list}) { font: 13.333px Arial; color: #000; background: #fff; border: 1px solid #767676; border-radius: 0;
    padding: 0 2px; gap: 2px; min-inline-size: 0; min-block-size: 0; block-size: 19px; white-space: nowrap;
    overflow: hidden }
  :where(${list})::picker-icon { font-size: 9px; line-height: 17px; position: sticky; inset-inline-end: -2px;
    padding-inline: 2px; background: inherit }
  :where(${list})::picker(select) { font: 13.333px Arial; color: #000; background: #fff; border: 1px solid #767676;
    padding: 0; inline-size: max-content }
  :where(${list} option) { padding: 1px 4px; gap: 0; min-block-size: 0; outline: none }
  :where(${list} option)::checkmark { display: none }
  :where(${list} option:hover) { background: #e5e5e5 }
  :where(${list} option:focus) { color: #fff; background: #1967d2 }
  input::-webkit-calendar-picker-indicator { display: none !important }
`);
const isHere = (holder) => (holder.ownerDocument ?? holder) === document;
for (const kind of [Document, ShadowRoot]) {
  const sheets = Object.getOwnPropertyDescriptor(kind.prototype, 'adoptedStyleSheets');
  Object.defineProperty(kind.prototype, 'adoptedStyleSheets', {
    ...sheets,
    set(wanted) {
      const own = [...wanted].filter((one) => one !== sheet);
      sheets.set.call(this, isHere(this) ? [...own, sheet] : own);
    },
  });
}
document.adoptedStyleSheets = [];
const attachShadow = Element.prototype.attachShadow;
Element.prototype.attachShadow = function (options) {
  const root = attachShadow.call(this, options);
  root.adoptedStyleSheets = [];
  return root;
};

// ------------------------------------------------------------------ pickers that are windows of their own

// Dates and times are typed; a colour is set by the page or not at all. A list that could not be drawn inside the page
// (in an old browser) still changes by arrow keys.
const target = (event) => event.composedPath()[0];
const FIELDS = new Set(['date', 'time', 'datetime-local', 'month', 'week', 'color']);
const isColor = (element) => element instanceof HTMLInputElement && element.type === 'color';
const isNativeList = (element) =>
  element instanceof HTMLSelectElement && element.matches(list) && getComputedStyle(element).appearance !== 'base-select';
const hasWindow = (element) =>
  (element instanceof HTMLInputElement && FIELDS.has(element.type)) || isNativeList(element);
for (const kind of ['mousedown', 'click']) {
  window.addEventListener(kind, (event) => {
    if (isColor(target(event)) || isNativeList(target(event))) {
      event.preventDefault();
      target(event).focus();
    }
  }, true);
}
window.addEventListener('keydown', (event) => {
  if (!hasWindow(target(event))) return;
  const isArrow = event.altKey && (event.key === 'ArrowUp' || event.key === 'ArrowDown');
  const isEnter = event.key === 'Enter' && (isColor(target(event)) || isNativeList(target(event)));
  if (event.key === ' ' || event.key === 'F4' || isArrow || isEnter) event.preventDefault();
}, true);
for (const kind of [HTMLInputElement, HTMLSelectElement]) {
  const { showPicker } = kind.prototype;
  kind.prototype.showPicker = function () {
    if (!hasWindow(this)) showPicker.call(this);
  };
}

// ------------------------------------------------------------------ clipboard

// The browser has one clipboard for all its pages. Each session has its own, kept here: text only.
const shared = Symbol.for('palaestra.clipboard');
let owner = window;
try {
  if (window.top[shared]) owner = window.top;
} catch {
  // A document of another origin keeps its own.
}
if (owner === window) {
  Object.defineProperty(window, shared, { value: { text: settings.clipboard } });
}
const clipboard = owner[shared];
const writeClipboard = (text) => {
  clipboard.text = text;
  if (report) report(text);
};
const selectedText = () => {
  const field = document.activeElement;
  if (field instanceof HTMLTextAreaElement || (field instanceof HTMLInputElement && field.selectionStart !== null)) {
    return field.type === 'password' ? '' : field.value.slice(field.selectionStart, field.selectionEnd);
  }
  return String(window.getSelection());
};
for (const kind of ['copy', 'cut', 'paste']) {
  window.addEventListener(kind, (event) => {
    if (!event.isTrusted) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    const data = new DataTransfer();
    if (kind === 'paste') data.setData('text/plain', clipboard.text);
    const own = new ClipboardEvent(kind, { bubbles: true, cancelable: true, composed: true, clipboardData: data });
    const goesOn = target(event).dispatchEvent(own);
    if (kind === 'paste') {
      if (goesOn && clipboard.text) document.execCommand('insertText', false, clipboard.text);
      return;
    }
    const text = goesOn ? selectedText() : data.getData('text/plain');
    if (text || !goesOn) writeClipboard(text);
    if (goesOn && text && kind === 'cut') document.execCommand('delete');
  }, true);
}
if (window.Clipboard) {
  Object.assign(Clipboard.prototype, {
    async readText() {
      return clipboard.text;
    },
    async writeText(text) {
      writeClipboard(String(text));
    },
    async read() {
      return [new ClipboardItem({ 'text/plain': new Blob([clipboard.text], { type: 'text/plain' }) })];
    },
    async write(items) {
      for (const item of items) {
        if (item.types.includes('text/plain')) writeClipboard(await (await item.getType('text/plain')).text());
      }
    },
  });
}
