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
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Interval, MissedTickBehavior, interval};

/// How often a comment is sent while there is nothing to say, for proxies that end silent connections.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How chunks are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Events {
    /// As data alone, and at the end `[DONE]`.
    Plain,
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
    fn keep_alive(&self) -> Option<Value> {
        None
    }
}

struct EventBody<C> {
    answers: Answers,
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
        while let Poll::Ready(next) = this.answers.poll_next(cx) {
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
    let body = EventBody {
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
