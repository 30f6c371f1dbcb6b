//! Answers as server-sent events, each sent when it is there.

use crate::error::ApiError;
use crate::generation::generation_stream::{GenerationEvent, GenerationStream};
use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use axum::response::Response;
use hyper::body::Frame;
use serde::Serialize;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Interval, MissedTickBehavior, interval, sleep_until};

/// How often something is sent while there is nothing to say, for proxies and clients that end silent connections.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// An event that says what it is: its name is its `type`.
pub(crate) trait NamedEvent: Serialize {
    fn name(&self) -> &'static str;
}

/// Events as they are sent. Values are written where they go, through no form between.
#[derive(Debug, Default)]
pub(crate) struct EventText(Vec<u8>);

impl EventText {
    /// An event without a name.
    pub(crate) fn data(&mut self, data: &impl Serialize) {
        self.write("", data);
    }

    /// An event with its name.
    pub(crate) fn named(&mut self, event: &impl NamedEvent) {
        self.write(event.name(), event);
    }

    fn write(&mut self, name: &str, data: &impl Serialize) {
        let begin = self.0.len();
        if !name.is_empty() {
            for part in ["event: ", name, "\n"] {
                self.0.extend_from_slice(part.as_bytes());
            }
        }
        self.0.extend_from_slice(b"data: ");
        // JSON has no line breaks outside of strings, and inside they are escaped.
        match serde_json::to_writer(&mut self.0, data) {
            Ok(()) => self.0.extend_from_slice(b"\n\n"),
            // Only a type that JSON cannot have fails, and none of ours is.
            Err(error) => {
                tracing::error!(%error, "an event could not be written");
                self.0.truncate(begin);
            }
        }
    }

    /// The data of each event.
    #[cfg(test)]
    pub(crate) fn data_values(&self) -> Vec<serde_json::Value> {
        let text = str::from_utf8(&self.0).unwrap();
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Encodes generation events as the chunks of a route.
pub(crate) trait StreamEncoder: Send + Unpin + 'static {
    /// Whether `[DONE]` is the end; else the last chunk says itself that it is the last.
    const DONE: bool;

    /// The chunks before anything has come.
    fn begin(&mut self, _out: &mut EventText) {}

    /// Encodes an event; `GenerationEvent::Done` gives the last chunks.
    fn encode(&mut self, event: GenerationEvent, out: &mut EventText);

    /// The chunks at the end of an answer that failed.
    fn failed(&mut self, error: &ApiError, out: &mut EventText) {
        out.data(&error.body());
    }

    /// What is sent while there is nothing to say; if it is nothing, a comment is.
    fn keep_alive(&mut self, _out: &mut EventText) {}
}

/// The stream of a body. It ends at its deadline even if the body is not polled, as when the client does not read.
struct Shared {
    answers: GenerationStream,
    /// Who waits for what comes next.
    reader: Option<Waker>,
}

/// Ends the answers at their deadline, unless they are gone by then.
struct DeadlineTask(JoinHandle<()>);

impl DeadlineTask {
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

impl Drop for DeadlineTask {
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
    _deadline_task: Option<DeadlineTask>,
    encoder: C,
    keep_alive: Interval,
    begun: bool,
    ended: bool,
}

impl<C: StreamEncoder> EventBody<C> {
    /// The text of an event; empty if the encoder writes nothing for it.
    fn render(&mut self, event: GenerationEvent) -> EventText {
        let mut text = EventText::default();
        match event {
            GenerationEvent::Failed(error) => {
                self.ended = true;
                self.encoder.failed(&error, &mut text);
            }
            event => {
                self.ended = matches!(event, GenerationEvent::Done(_));
                self.encoder.encode(event, &mut text);
            }
        }
        if self.ended && C::DONE {
            text.0.extend_from_slice(b"data: [DONE]\n\n");
        }
        text
    }
}

fn poll_next(shared: &Mutex<Shared>, cx: &mut Context<'_>) -> Poll<Option<GenerationEvent>> {
    let mut shared = lock(shared);
    let next = shared.answers.poll_next(cx);
    shared.reader = next.is_pending().then(|| cx.waker().clone());
    next
}

impl<C: StreamEncoder> hyper::body::Body for EventBody<C> {
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
            let mut text = EventText::default();
            this.encoder.begin(&mut text);
            if !text.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(text.0.into()))));
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
                return Poll::Ready(Some(Ok(Frame::data(text.0.into()))));
            }
        }
        if this.keep_alive.poll_tick(cx).is_ready() {
            let mut text = EventText::default();
            this.encoder.keep_alive(&mut text);
            let text = match text.is_empty() {
                true => Bytes::from_static(b": keep-alive\n\n"),
                false => text.0.into(),
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
pub(crate) fn response(answers: GenerationStream, encoder: impl StreamEncoder) -> Response {
    let mut keep_alive = interval(KEEP_ALIVE);
    keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick of an interval is at once.
    keep_alive.reset();
    let answers = Arc::new(Mutex::new(Shared {
        answers,
        reader: None,
    }));
    let body = EventBody {
        _deadline_task: DeadlineTask::of(&answers),
        answers,
        encoder,
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
    use ferrum_engine::{GenerationParams, Request};
    use std::time::Instant;

    struct Nothing;

    impl StreamEncoder for Nothing {
        const DONE: bool = true;

        fn encode(&mut self, _: GenerationEvent, _: &mut EventText) {}
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
        let house = tokio::spawn(Arc::clone(&models).unload_idle_models());
        let generation = GenerationParams {
            max_tokens: 1,
            ..GenerationParams::default()
        };
        let request = Request {
            timeout: Some(Duration::from_millis(1)),
            ..Request::new(vec![5], generation)
        };
        let answers = GenerationStream::begin(&lease, "prompt", 1, [request]).unwrap();
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
