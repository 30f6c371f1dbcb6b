//! What fuzz targets call of this crate and nobody else may: it is there only where cargo-fuzz builds.

use crate::http::{app::App, router};
use crate::output::{CallFormat, Delta, Function, OutputFormat, OutputParser};
use crate::{ModelLoader, ServerConfig};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Method, Request, Uri};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use std::convert::Infallible;
use std::sync::Arc;

/// What is to be looked for in an answer.
#[derive(Clone, Debug)]
pub struct AnswerFormat(OutputFormat);

/// An answer, taken apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// What is neither reasoning nor a call.
    pub content: String,
    /// What was thought.
    pub reasoning: String,
    /// Names and arguments of calls.
    pub calls: Vec<(String, String)>,
}

impl AnswerFormat {
    /// Answers in `format`, with calls of `functions` (names and schemas), at most `max_calls` of them.
    pub fn new(format: CallFormat, functions: &[(&str, Value)], max_calls: usize) -> Self {
        let functions = functions.iter().enumerate();
        let functions = functions.map(|(index, (name, parameters))| Function {
            index,
            name: (*name).to_owned(),
            parameters: parameters.clone(),
            strict: false,
        });
        Self(OutputFormat {
            reasoning: true,
            format,
            max_calls,
            functions: functions.collect(),
            ..OutputFormat::default()
        })
    }

    /// One for each way to write calls.
    pub fn all(functions: &[(&str, Value)], max_calls: usize) -> Vec<Self> {
        let formats = CallFormat::all();
        let formats = formats.map(|format| Self::new(format, functions, max_calls));
        formats.collect()
    }

    /// Takes an answer apart that comes in `chunks`. `cut`: it was cut off.
    ///
    /// # Panics
    /// When calls are not numbered one by one, or arguments come to a call that is not the last.
    pub fn parse<'a>(&self, chunks: impl IntoIterator<Item = &'a str>, cut: bool) -> Answer {
        let mut parser = OutputParser::new(self.0.clone());
        let mut deltas = Vec::new();
        for chunk in chunks {
            deltas.extend(parser.push(chunk));
        }
        deltas.extend(parser.finish(cut));
        let mut answer = Answer::default();
        for delta in deltas {
            match delta {
                Delta::Content(text) => answer.content += &text,
                Delta::Reasoning(text) => answer.reasoning += &text,
                Delta::CallBegins(index, name) => {
                    assert_eq!(index, answer.calls.len(), "calls are counted");
                    answer.calls.push((name, String::new()));
                }
                Delta::CallArguments(index, text) => {
                    assert_eq!(index + 1, answer.calls.len(), "arguments of the last call");
                    answer.calls[index].1 += &text;
                }
            }
        }
        answer
    }
}

/// The routes of a server without its connections.
pub struct Routes(TowerToHyperService<Router>);

impl Routes {
    /// Routes to models of these names, the first of which is meant by requests that name none.
    pub fn new(names: Vec<String>, loader: Arc<dyn ModelLoader>, config: ServerConfig) -> Self {
        let app = Arc::new(App::new(names, loader, config, None));
        Self(TowerToHyperService::new(router::router(app)))
    }

    /// The status and the whole body of the answer to a POST.
    ///
    /// # Panics
    /// When the answer breaks off.
    pub async fn post(
        &self,
        path: &'static str,
        kind: &'static str,
        body: &[u8],
    ) -> (u16, Vec<u8>) {
        let mut request = Request::new(Body::from(body.to_vec()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_static(path);
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        let response = self.0.call(request).await;
        let response = response.unwrap_or_else(|never: Infallible| match never {});
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), usize::MAX).await;
        (status, body.expect("an answer is whole").to_vec())
    }
}
