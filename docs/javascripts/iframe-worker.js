// The site's search runs in a worker, and browsers start none for a page that was opened from a folder. There a hidden
// frame runs the worker's script instead. The name tells the theme not to load such a script from another server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = [] // messages from before the script was loaded
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.addEventListener("load", () => this.start(url), {once: true})
      document.body.append(this.frame)
    }

    start(url) {
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      const script = inside.document.createElement("script")
      script.src = url
      script.addEventListener("load", () => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach(data => this.postMessage(data))
      })
      inside.document.body.append(script)
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data}))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
