//! The server that is measured: what is said to it, and when what comes back.

use super::workload::{BenchRequest, TokenEstimate, WORDS};
use crate::args::StreamRoute;
use crate::failure::{Failure, Outcome};
use crate::ui::say;
use ferrum_client::ClientError;
use ferrum_client::http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use ferrum_client::http::{Client, Events, Method, Proxy, Request, Response, Timeouts, Url};
use ferrum_formats::Shown;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Longest answer that is no stream.
const MAX_BODY: usize = 4 << 20;

/// How long a server may take for anything. Waiting in its queue is what is measured.
const TIMEOUT: Duration = Duration::from_secs(1800);

/// The latencies and token counts of a request.
#[derive(Debug)]
pub(super) struct RequestTiming {
    /// Time to the first token, in seconds.
    pub(super) ttft_s: f64,
    /// Inter-token latencies: seconds between chunks of text.
    pub(super) itl_s: Vec<f64>,
    /// Seconds until the answer was complete.
    pub(super) total_s: f64,
    /// Tokens, where the server counts them.
    pub(super) prompt_tokens: Option<u64>,
    /// Tokens of the answer, or its pieces where the server does not count.
    pub(super) output_tokens: u64,
}

/// Why a request has no answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RequestFailure {
    /// `status 429`, `unreachable`, …: what is counted together.
    pub(super) kind: String,
    pub(super) message: String,
}

impl From<ClientError> for RequestFailure {
    fn from(e: ClientError) -> Self {
        let kind = match &e {
            ClientError::Unreachable { .. } => "unreachable",
            ClientError::Timeout { .. } => "timeout",
            _ => "protocol",
        };
        trouble(kind, e)
    }
}

fn trouble(kind: &str, message: impl std::fmt::Display) -> RequestFailure {
    RequestFailure {
        kind: kind.to_owned(),
        message: message.to_string(),
    }
}

impl From<RequestFailure> for Failure {
    fn from(trouble: RequestFailure) -> Self {
        Failure::new(trouble.message)
    }
}

/// A server, and what it understands.
pub(super) struct Target {
    client: Client,
    /// Ends with `/v1`.
    base: String,
    key: Option<HeaderValue>,
    route: StreamRoute,
    pub(super) model: String,
    /// Whether it goes on after the end of an answer when asked to, as vLLM does.
    ignores_end: bool,
    /// Whether it counts tokens in a stream.
    counts: bool,
}

impl Target {
    pub(super) fn new(url: &str, key: Option<&str>, route: StreamRoute) -> Outcome<Self> {
        let base = Url::parse(url)?.to_string();
        let base = base.trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base);
        let key = key
            .map(|key| HeaderValue::from_str(&format!("Bearer {key}")))
            .transpose();
        let variable = |name: &str| std::env::var(name).ok();
        let proxy = Proxy::from_env(variable);
        let timeouts = Timeouts {
            connect: TIMEOUT,
            response: TIMEOUT,
            read: TIMEOUT,
        };
        Ok(Self {
            client: Client::new(timeouts, proxy?),
            base: format!("{base}/v1"),
            key: key.map_err(|_| Failure::new("the key holds characters that no key has"))?,
            route,
            model: String::new(),
            ignores_end: true,
            counts: true,
        })
    }

    /// The address that requests go to.
    pub(super) fn url(&self) -> String {
        format!("{}/{}", self.base, self.route.path())
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Request, ClientError> {
        let mut request = Request::new(method, Url::parse(&format!("{}/{path}", self.base))?);
        if let Some(key) = &self.key {
            request.headers.insert(AUTHORIZATION, key.clone());
        }
        if let Some(body) = body {
            request
                .headers
                .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            request.body = body.to_string().into();
        }
        Ok(request)
    }

    /// Takes the model of that name, or the first that the server has.
    pub(super) async fn choose_model(&mut self, name: Option<&str>) -> Outcome {
        if let Some(name) = name {
            self.model = name.to_owned();
            return Ok(());
        }
        let request = self.request(Method::GET, "models", None)?;
        let response = answered(self.client.send(&request).await?).await?;
        let body = response.bytes(MAX_BODY).await?;
        let models: Value = serde_json::from_slice(&body).unwrap_or_default();
        let Some(name) = models["data"][0]["id"].as_str() else {
            let hint = "name it with --model";
            let message = format!("{}/models names no model\nhint: {hint}", self.base);
            return Err(Failure::new(message));
        };
        self.model = name.to_owned();
        Ok(())
    }

    fn body(&self, asked: &BenchRequest) -> Value {
        let mut body = json!({
            "model": self.model,
            "max_tokens": asked.output_tokens,
            "temperature": 1.0,
            "seed": asked.seed,
            "stream": true,
        });
        match self.route {
            StreamRoute::Chat => {
                body["messages"] = json!([{"role": "user", "content": asked.prompt}]);
            }
            StreamRoute::Completions => body["prompt"] = json!(asked.prompt),
        }
        if self.ignores_end {
            body["ignore_eos"] = json!(true);
        }
        if self.counts {
            body["stream_options"] = json!({"include_usage": true});
        }
        body
    }

    /// Finds out what the server understands, and how words become tokens.
    pub(super) async fn warm_up(&mut self) -> Outcome<Option<TokenEstimate>> {
        let mut counted = Vec::new();
        // Each word there is, so that their tokens have the mean that prompts will have.
        for words in [&WORDS[..1], &WORDS] {
            let asked = BenchRequest {
                prompt: words.join(" "),
                output_tokens: 1,
                seed: 0,
            };
            let sample = loop {
                match self.send(&asked).await {
                    Ok(sample) => break sample,
                    // Servers of other makers know fewer fields.
                    Err(trouble) if trouble.kind == "status 400" && self.ignores_end => {
                        say("note: the server does not take ignore_eos, so answers may be shorter");
                        self.ignores_end = false;
                    }
                    Err(trouble) if trouble.kind == "status 400" && self.counts => {
                        self.counts = false
                    }
                    Err(trouble) => return Err(trouble.into()),
                }
            };
            let n = words.len() as f64;
            counted.extend(sample.prompt_tokens.map(|tokens| (n, tokens as f64)));
        }
        Ok(match counted.as_slice() {
            [few, many] => Some(TokenEstimate::of(*few, *many)),
            _ => None,
        })
    }

    /// Sends a request, and reads its answer to the end.
    pub(super) async fn send(&self, asked: &BenchRequest) -> Result<RequestTiming, RequestFailure> {
        let body = self.body(asked);
        let request = self.request(Method::POST, self.route.path(), Some(&body))?;
        let started = Instant::now();
        let mut response = answered(self.client.send(&request).await?).await?;
        let mut stream = Stream::new(started);
        while let Some(chunk) = response.chunk().await? {
            let now = Instant::now();
            for event in stream.events.push(&chunk)? {
                stream.event(&event, now)?;
            }
        }
        stream.end()
    }
}

/// The answer, if it is one.
async fn answered(response: Response) -> Result<Response, RequestFailure> {
    if response.status.is_success() {
        return Ok(response);
    }
    let (status, url) = (response.status.as_u16(), response.url().to_string());
    let body = response.bytes(MAX_BODY).await.unwrap_or_default();
    let json: Value = serde_json::from_slice(&body).unwrap_or_default();
    let said = json["error"]["message"].as_str().unwrap_or_default();
    let message = format!("{url}: status {status}: {}", Shown(said));
    Err(trouble(&format!("status {status}"), message))
}

/// An answer that is coming.
struct Stream {
    events: Events,
    started: Instant,
    last: Option<Instant>,
    ttft_s: f64,
    itl_s: Vec<f64>,
    usage: Value,
    done: bool,
}

impl Stream {
    fn new(started: Instant) -> Self {
        Self {
            events: Events::default(),
            started,
            last: None,
            ttft_s: 0.0,
            itl_s: Vec::new(),
            usage: Value::Null,
            done: false,
        }
    }

    fn event(&mut self, data: &str, now: Instant) -> Result<(), RequestFailure> {
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Value = serde_json::from_str(data)
            .map_err(|e| trouble("broken stream", format!("an event is no JSON: {e}")))?;
        if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
            let said = error["message"]
                .as_str()
                .unwrap_or("the stream ends with an error");
            return Err(trouble("broken stream", Shown(said)));
        }
        if let Some(usage) = chunk.get("usage").filter(|usage| usage.is_object()) {
            self.usage = usage.clone();
        }
        if !has_text(&chunk) {
            return Ok(());
        }
        match self.last.replace(now) {
            None => self.ttft_s = (now - self.started).as_secs_f64(),
            Some(last) => self.itl_s.push((now - last).as_secs_f64()),
        }
        Ok(())
    }

    fn end(self) -> Result<RequestTiming, RequestFailure> {
        let total_s = self.started.elapsed().as_secs_f64();
        if !self.done {
            return Err(trouble("broken stream", "the stream ended before [DONE]"));
        }
        let pieces = u64::from(self.last.is_some()) + self.itl_s.len() as u64;
        let count = |name: &str| self.usage[name].as_u64();
        Ok(RequestTiming {
            // Tokens that are no text, such as half a character, may be all of an answer.
            ttft_s: if pieces > 0 { self.ttft_s } else { total_s },
            total_s,
            prompt_tokens: count("prompt_tokens"),
            output_tokens: count("completion_tokens").unwrap_or(pieces),
            itl_s: self.itl_s,
        })
    }
}

/// Whether a chunk of either route brings something to read.
fn has_text(chunk: &Value) -> bool {
    let choice = &chunk["choices"][0];
    let texts = [
        &choice["text"],
        &choice["delta"]["content"],
        &choice["delta"]["reasoning_content"],
    ];
    let text = texts
        .iter()
        .any(|text| text.as_str().is_some_and(|text| !text.is_empty()));
    text || choice["delta"]["tool_calls"].is_array()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_is_timed() {
        let started = Instant::now();
        let at = |ms: u64| started + Duration::from_millis(ms);
        let mut stream = Stream::new(started);
        for (data, ms) in [
            (
                r#"{"choices": [{"delta": {"role": "assistant", "content": ""}}]}"#,
                1,
            ),
            (
                r#"{"choices": [{"delta": {"reasoning_content": "a"}}]}"#,
                10,
            ),
            (r#"{"choices": [{"text": "b"}]}"#, 30),
            (
                r#"{"choices": [{"delta": {}, "finish_reason": "stop"}]}"#,
                35,
            ),
            (
                r#"{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}"#,
                40,
            ),
            ("[DONE]", 40),
        ] {
            stream.event(data, at(ms)).unwrap();
        }
        let sample = stream.end().unwrap();
        assert!((sample.ttft_s - 0.010).abs() < 1e-9);
        assert_eq!(sample.itl_s.len(), 1);
        assert_eq!((sample.prompt_tokens, sample.output_tokens), (Some(7), 3));
    }

    #[test]
    fn a_broken_stream_is_no_answer() {
        let now = Instant::now();
        assert_eq!(Stream::new(now).end().unwrap_err().kind, "broken stream");
        for data in ["{", r#"{"error": {"message": "out of luck"}}"#] {
            assert_eq!(
                Stream::new(now).event(data, now).unwrap_err().kind,
                "broken stream"
            );
        }
    }

    #[test]
    fn addresses_come_with_and_without_their_version() {
        for url in [
            "http://a:1",
            "http://a:1/",
            "http://a:1/v1",
            "http://a:1/v1/",
        ] {
            let target = Target::new(url, None, StreamRoute::Chat).unwrap();
            assert_eq!(target.url(), "http://a:1/v1/chat/completions");
        }
        assert!(Target::new("a", None, StreamRoute::Chat).is_err());
        assert!(Target::new("http://a", Some("a\nb"), StreamRoute::Chat).is_err());
    }
}
