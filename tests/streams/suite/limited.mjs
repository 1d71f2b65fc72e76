// A fetch that does not wait for ever. When the server dies under the first request of a process,
// the fetch of Node 20 can stay open for minutes, although its connection is gone and other servers
// have come since: 7 of 456 did. So who gets no head within the limit gives up with an error like
// that of a broken connection, and may ask again. Each time is told, as milliseconds since the
// epoch: the test knows when it killed the server, and one that was there must have answered.
export function limited(limitMs, unanswered) {
  return async (url, init = {}) => {
    const began = Date.now()
    const ours = new AbortController()
    const limit = setTimeout(() => ours.abort(), limitMs)
    const signal = init.signal ? AbortSignal.any([init.signal, ours.signal]) : ours.signal
    try {
      return await fetch(url, { ...init, signal })
    } catch (error) {
      if (!ours.signal.aborted || init.signal?.aborted) throw error
      unanswered.push([began, Date.now()])
      throw new TypeError(`no answer within ${limitMs} ms`)
    } finally {
      clearTimeout(limit)
    }
  }
}
