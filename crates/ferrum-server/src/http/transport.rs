//! Connection timeouts for idle, slow-sending and non-reading clients, and a close that does not lose answers.
//!
//! [`TimeoutStream`] is a stream between the socket and HTTP (below TLS, so that handshakes cannot stall either).
//! It sees bytes only. What it has to know of requests, whether one is open and whether a body was left unread,
//! [`Activity`] tells it.
//!
//! A request can be answered before its body has arrived: it is too long, say, or has no valid key. If the socket were
//! closed then, TCP would reset the connection (RFC 9112, 9.6), and a client that is still sending would lose the
//! answer. So the rest is read and discarded until the client falls silent or the time of a body is over.

use axum::body::{Body, Bytes};
use axum::response::Response;
use hyper::Request;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::service::Service;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// How long a client may be silent while the rest of its body is discarded.
const LINGER_SILENCE: Duration = Duration::from_secs(2);

/// How long a connection may stand still.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    /// From the first byte of a request to the end of its headers, and for the rest of a body that is discarded.
    pub(crate) head: Duration,
    /// Without a request.
    pub(crate) idle: Duration,
    /// With bytes to write of which the client takes none.
    pub(crate) write: Duration,
}

/// The requests of a connection.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    /// All that have begun.
    begun: AtomicU64,
    /// Those whose answers have not been handed on to their end.
    open: AtomicUsize,
    /// Whether the last body was dropped before its end had arrived.
    body_unread: AtomicBool,
}

/// A request that is open.
struct OpenRequest(Arc<Activity>);

impl OpenRequest {
    fn begin(activity: &Arc<Activity>) -> Self {
        activity.begun.fetch_add(1, Ordering::Relaxed);
        activity.open.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(activity))
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request's body, which tells when it is dropped before its end.
pub(crate) struct RequestBody {
    body: Incoming,
    /// Its end was read. Bodies in chunks tell it only when they are asked for more.
    ended: bool,
    activity: Arc<Activity>,
}

impl hyper::body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        self.ended |= matches!(frame, Poll::Ready(None));
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        use hyper::body::Body as _;
        // What is there already, such as a short body that came with its head, is not left unread.
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(Ok(_))) = Pin::new(&mut *self).poll_frame(&mut cx) {}
        let unread = !self.ended && !self.is_end_stream();
        self.activity.body_unread.store(unread, Ordering::Relaxed);
    }
}

/// What answers requests, and tells `activity` of each until the last byte of its answer.
pub(crate) fn counted<S>(
    service: S,
    activity: Arc<Activity>,
) -> impl Service<
    Request<Incoming>,
    Response = Response,
    Error = Infallible,
    Future = impl Future<Output = Result<Response, Infallible>> + Send,
>
where
    S: Service<Request<RequestBody>, Response = Response, Error = Infallible>,
    S::Future: Send,
{
    hyper::service::service_fn(move |request: Request<Incoming>| {
        let open = OpenRequest::begin(&activity);
        let activity = Arc::clone(&activity);
        let request = request.map(|body| RequestBody {
            body,
            ended: false,
            activity,
        });
        let answer = service.call(request);
        async move {
            let answer = answer.await?;
            Ok(answer.map(|body| Body::new(OpenBody { body, _open: open })))
        }
    })
}

/// A body that keeps its request open.
struct OpenBody {
    body: Body,
    _open: OpenRequest,
}

impl hyper::body::Body for OpenBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What a connection is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// A request is open: its body has a limit of its own.
    Open,
    /// Nothing has come since the last request.
    Idle,
    /// The head of a request is under way.
    Head,
}

/// The times of discarding the rest of a body.
#[derive(Debug)]
struct Linger {
    end: Pin<Box<Sleep>>,
    silence: Pin<Box<Sleep>>,
}

/// See the [module](self). A read that takes too long is the end of the stream; so is it to HTTP.
#[derive(Debug)]
pub(crate) struct TimeoutStream<S> {
    stream: S,
    timeouts: Timeouts,
    activity: Arc<Activity>,
    /// Requests that had begun at the last look.
    seen: u64,
    reading: Reading,
    /// Runs while a read waits.
    read_timer: Option<Pin<Box<Sleep>>>,
    /// Runs while a write waits.
    write_timer: Option<Pin<Box<Sleep>>>,
    /// Runs from the end of what is written, while the rest of a body is discarded.
    linger: Option<Linger>,
}

impl<S> TimeoutStream<S> {
    pub(crate) fn new(stream: S, timeouts: Timeouts, activity: Arc<Activity>) -> Self {
        Self {
            stream,
            timeouts,
            activity,
            seen: 0,
            reading: Reading::Open,
            read_timer: None,
            write_timer: None,
            linger: None,
        }
    }

    fn wait_for(&mut self, reading: Reading) {
        if self.reading != reading {
            self.reading = reading;
            self.read_timer = None;
        }
    }

    /// Takes note of requests that began or ended since the last look.
    fn look_at_requests(&mut self) -> bool {
        let begun = self.activity.begun.load(Ordering::Relaxed);
        let open = self.activity.open.load(Ordering::Relaxed) > 0;
        // Also one that began and ended meanwhile.
        if open || begun != self.seen {
            self.seen = begun;
            self.wait_for(Reading::Open);
        }
        open
    }

    /// Whether a read that has nothing has waited for long enough.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let limit = match self.reading {
            Reading::Open => return Poll::Pending,
            Reading::Idle => self.timeouts.idle,
            Reading::Head => self.timeouts.head,
        };
        let timer = self
            .read_timer
            .get_or_insert_with(|| Box::pin(sleep(limit)));
        timer.as_mut().poll(cx)
    }

    /// Discards what arrives until the client closes its side or falls silent, the connection breaks or the time is
    /// over.
    fn poll_discard(&mut self, cx: &mut Context<'_>) -> Poll<()>
    where
        S: AsyncRead + Unpin,
    {
        let whole = self.timeouts.head;
        let Linger { end, silence } = self.linger.get_or_insert_with(|| Linger {
            end: Box::pin(sleep(whole)),
            silence: Box::pin(sleep(LINGER_SILENCE)),
        });
        if end.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let mut bytes = [0; 8 << 10];
        loop {
            let mut buffer = ReadBuf::new(&mut bytes);
            match Pin::new(&mut self.stream).poll_read(cx, &mut buffer) {
                Poll::Pending => return silence.as_mut().poll(cx),
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    silence.as_mut().reset(Instant::now() + LINGER_SILENCE);
                }
                Poll::Ready(_) => return Poll::Ready(()),
            }
        }
    }

    /// Returns the outcome of a write; a write that waits for too long is an error.
    fn written(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if outcome.is_ready() {
            self.write_timer = None;
            if self.reading == Reading::Idle {
                // A client that reads the end of a long answer is not idle.
                self.read_timer = None;
            }
            return outcome;
        }
        let limit = self.timeouts.write;
        let timer = self
            .write_timer
            .get_or_insert_with(|| Box::pin(sleep(limit)));
        let stalled = || io::Error::new(io::ErrorKind::TimedOut, "the client does not read");
        timer.as_mut().poll(cx).map(|()| Err(stalled()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimeoutStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let open = this.look_at_requests();
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if !open && outcome.is_ready() && buffer.filled().len() > before {
            this.wait_for(Reading::Head);
        } else if !open && this.reading == Reading::Open {
            this.wait_for(Reading::Idle);
        }
        match outcome {
            Poll::Pending => this.poll_silence(cx).map(Ok),
            ready => ready,
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for TimeoutStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.written(cx, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.written(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    // A socket has nothing to flush: this neither stalls nor tells of progress.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        // After an answer, HTTP flushes and does not read again while its last read waits: the clock has to be set
        // here. When it is over, the read is asked again and ends.
        if !this.look_at_requests() {
            if this.reading == Reading::Open {
                this.wait_for(Reading::Idle);
            }
            let _ = this.poll_silence(cx);
        }
        Pin::new(&mut this.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.linger.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
        }
        match this.activity.body_unread.load(Ordering::Relaxed) {
            true => this.poll_discard(cx).map(Ok),
            false => Poll::Ready(Ok(())),
        }
    }
}
