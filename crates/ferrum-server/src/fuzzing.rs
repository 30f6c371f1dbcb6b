//! Access to internals for fuzz targets; compiled only with them.

use crate::http::{app::App, router};
use crate::output::{CallFormat, Function, OutputFormat};
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

pub use crate::output::ParsedOutput;

/// An output format with tools.
#[derive(Clone, Debug)]
pub struct AnswerFormat(OutputFormat);

impl AnswerFormat {
    /// Outputs in `format`, with calls of `functions` (names and schemas), at most `max_calls` of them.
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

    /// One for each format of calls.
    pub fn all(functions: &[(&str, Value)], max_calls: usize) -> Vec<Self> {
        let formats = CallFormat::all();
        let formats = formats.map(|format| Self::new(format, functions, max_calls));
        formats.collect()
    }

    /// Parses a text that comes in `chunks`. `cut`: generation stopped at its limit.
    ///
    /// # Panics
    /// If calls are not numbered one by one, or arguments belong to a call that is not the last.
    pub fn parse<'a>(&self, chunks: impl IntoIterator<Item = &'a str>, cut: bool) -> ParsedOutput {
        ParsedOutput::of(&self.0, chunks, cut)
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
