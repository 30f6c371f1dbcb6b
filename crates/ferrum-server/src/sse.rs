//! Answers as server-sent events, each sent when it is there.

use crate::answers::{Answers, Next};
use crate::error::ApiError;
use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use axum::response::Response;
use hyper::body::Frame;
use serde_json::Value;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Interval, MissedTickBehavior, interval, sleep_until};

/// How often something is sent while there is nothing to say, for proxies and clients that end silent connections.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How chunks are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Events {
    /// As data alone, and at the end `[DONE]`.
    Plain,
    /// As data alone; the last says itself that it is the last.
    Bare,
    /// Each with its `type` as the event's name; the last says itself that it is the last.
    Named,
}

/// Gives answers the shape of a route's chunks.
pub(crate) trait Chunks: Send + Unpin + 'static {
    /// How they are written.
    const EVENTS: Events;

    /// The chunks before anything has come.
    fn begin(&mut self, _out: &mut Vec<Value>) {}

    /// The chunks for what came; of `Next::Done`, those at the end.
    fn chunks(&mut self, next: Next, out: &mut Vec<Value>);

    /// The chunks at the end of an answer that failed.
    fn failed(&mut self, error: &ApiError, out: &mut Vec<Value>) {
        out.push(error.body());
    }

    /// What is sent while there is nothing to say; without it, a comment is.
    fn keep_alive(&mut self) -> Option<Value> {
        None
    }
}

/// The answers of a body. They end at their deadline also where the body is not asked for more, because nobody
/// reads what was sent.
struct Shared {
    answers: Answers,
    /// Who waits for what comes next.
    reader: Option<Waker>,
}

/// Ends the answers at their deadline, unless they are gone by then.
struct Reaper(JoinHandle<()>);

impl Reaper {
    fn of(shared: &Arc<Mutex<Shared>>) -> Option<Self> {
        let deadline = lock(shared).answers.deadline()?;
        let shared = Arc::downgrade(shared);
        Some(Self(tokio::spawn(async move {
            sleep_until(deadline.into()).await;
            if let Some(shared) = shared.upgrade() {
                let mut shared = lock(&shared);
                shared.answers.expire();
                if let Some(reader) = shared.reader.take() {
                    reader.wake();
                }
            }
        })))
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // What a panic left half done ends the request, not the server.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

struct EventBody<C> {
    answers: Arc<Mutex<Shared>>,
    _reaper: Option<Reaper>,
    shape: C,
    keep_alive: Interval,
    begun: bool,
    ended: bool,
}

impl<C: Chunks> EventBody<C> {
    /// The text of what came next; empty when it shows nothing.
    fn render(&mut self, next: Next) -> String {
        let mut chunks = Vec::new();
        match next {
            Next::Failed(error) => {
                self.ended = true;
                self.shape.failed(&error, &mut chunks);
            }
            next => {
                self.ended = matches!(next, Next::Done(_));
                self.shape.chunks(next, &mut chunks);
            }
        }
        let mut text = written::<C>(&chunks);
        if self.ended && C::EVENTS == Events::Plain {
            text.push_str("data: [DONE]\n\n");
        }
        text
    }
}

fn poll_next(shared: &Mutex<Shared>, cx: &mut Context<'_>) -> Poll<Option<Next>> {
    let mut shared = lock(shared);
    let next = shared.answers.poll_next(cx);
    shared.reader = next.is_pending().then(|| cx.waker().clone());
    next
}

/// Chunks as events.
fn written<C: Chunks>(chunks: &[Value]) -> String {
    let mut text = String::new();
    for chunk in chunks {
        if let (Events::Named, Some(name)) = (C::EVENTS, chunk["type"].as_str()) {
            text.push_str(&format!("event: {name}\n"));
        }
        // JSON has no line breaks outside of strings, and inside they are escaped.
        text.push_str(&format!("data: {chunk}\n\n"));
    }
    text
}

impl<C: Chunks> hyper::body::Body for EventBody<C> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        if !std::mem::replace(&mut this.begun, true) {
            let mut chunks = Vec::new();
            this.shape.begin(&mut chunks);
            if !chunks.is_empty() {
                let text = written::<C>(&chunks);
                return Poll::Ready(Some(Ok(Frame::data(text.into()))));
            }
        }
        while let Poll::Ready(next) = poll_next(&this.answers, cx) {
            let Some(next) = next else {
                this.ended = true;
                return Poll::Ready(None);
            };
            let text = this.render(next);
            if !text.is_empty() {
                this.keep_alive.reset();
                return Poll::Ready(Some(Ok(Frame::data(text.into()))));
            }
        }
        if this.keep_alive.poll_tick(cx).is_ready() {
            let text = match this.shape.keep_alive() {
                Some(chunk) => written::<C>(&[chunk]).into(),
                None => Bytes::from_static(b": keep-alive\n\n"),
            };
            return Poll::Ready(Some(Ok(Frame::data(text))));
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}

/// A streamed response.
pub(crate) fn response(answers: Answers, shape: impl Chunks) -> Response {
    let mut keep_alive = interval(KEEP_ALIVE);
    keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick of an interval is at once.
    keep_alive.reset();
    let answers = Arc::new(Mutex::new(Shared {
        answers,
        reader: None,
    }));
    let body = EventBody {
        _reaper: Reaper::of(&answers),
        answers,
        shape,
        keep_alive,
        begun: false,
        ended: false,
    };
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("text/event-stream");
    headers.insert(CONTENT_TYPE, kind);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServerConfig;
    use crate::models::{Models, Status, demo};
    use ferrum_engine::{Generation, Request};
    use std::time::Instant;

    struct Nothing;

    impl Chunks for Nothing {
        const EVENTS: Events = Events::Plain;

        fn chunks(&mut self, _: Next, _: &mut Vec<Value>) {}
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_stream_that_nobody_reads_holds_its_model_until_its_deadline() {
        let config = ServerConfig {
            idle_unload: Some(Duration::from_millis(1)),
            ..ServerConfig::default()
        };
        let loader = |_: &str| Ok(demo());
        let models = Models::new(vec!["demo".into()], Arc::new(loader), &config);
        let lease = models.lease(None).await.unwrap();
        let house = tokio::spawn(Arc::clone(&models).keep_house());
        let generation = Generation {
            max_tokens: 1,
            ..Generation::default()
        };
        let request = Request {
            timeout: Some(Duration::from_millis(1)),
            ..Request::new(vec![5], generation)
        };
        let answers = Answers::begin(&lease, "prompt", 1, [request]).unwrap();
        drop(lease);
        // Never asked for a frame.
        let response = response(answers, Nothing);
        let began = Instant::now();
        while models.list().any(|(_, status)| status != Status::Unloaded) {
            assert!(began.elapsed() < Duration::from_secs(120), "still held");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        drop(response);
        house.abort();
    }
}
