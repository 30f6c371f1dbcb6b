//! What all routes have in common: the models, the settings, and reading of requests.

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::http::auth::Rights;
use crate::http::body_budget::{BodyBudget, BodyPermits};
use crate::http::multipart::{self, Form};
use crate::http::parse_threads::ParseThreads;
use crate::media::{FetchedImage, MediaFetcher, RemoteImage};
use crate::models::served::LoadedHandle;
use crate::models::{AnyLease, Lease, ModelLoader, Models};
use crate::observability::metrics::HttpCounts;
use crate::observability::otlp::Exporter;
use crate::observability::prometheus;
use crate::observability::record::RequestRecord;
use crate::observability::span::Attribute;
use crate::page::Page;
use crate::prompt::pending_prompt::PendingPrompt;
use crate::request::Body;
use crate::store::ResponseStore;
use axum::body::Bytes;
use axum::extract::Request;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// State of a server.
pub(crate) struct App {
    pub(crate) models: Arc<Models>,
    pub(crate) config: ServerConfig,
    pub(super) http: HttpCounts,
    pub(crate) metrics: Registry,
    bodies: BodyBudget,
    parse_threads: ParseThreads,
    /// Fetches images, if any may be fetched.
    media: Option<Arc<MediaFetcher>>,
    pub(crate) page: Page,
    /// Exports traces, if there is a collector.
    pub(crate) exporter: Option<Exporter>,
    pub(crate) responses: ResponseStore,
}

impl App {
    pub(crate) fn new(
        names: Vec<String>,
        loader: Arc<dyn ModelLoader>,
        config: ServerConfig,
        exporter: Option<Exporter>,
    ) -> Self {
        let models = Models::new(names, loader, &config);
        let http = HttpCounts::default();
        let spans = exporter.as_ref().map(Exporter::counts);
        Self {
            metrics: prometheus::registry(Arc::clone(&models), &http, spans),
            models,
            responses: ResponseStore::new(config.max_stored_bytes),
            bodies: BodyBudget::new(config.max_body_bytes, config.max_bodies_bytes),
            parse_threads: ParseThreads::new(),
            media: MediaFetcher::new(&config),
            config,
            http,
            page: Page::new(),
            exporter,
        }
    }

    /// Reads a request as `parse` says, for the model that it names, which is loaded if need be.
    pub(crate) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        request: Request,
        parse: impl FnOnce(&Self, &Lease, &mut Body) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Lease), ApiError> {
        let body = self.fields(request).await?;
        let lease = self.lease(body.text("model")?.as_deref()).await?;
        self.parse(body, lease, parse).await
    }

    /// Reads a request with a conversation; see [`Self::parse_chat`].
    pub(crate) async fn read_chat<T: Send + 'static>(
        self: &Arc<Self>,
        request: Request,
        parse: impl FnOnce(&Self, &Lease, &mut Body) -> Result<PendingPrompt<T>, ApiError>
        + Send
        + 'static,
    ) -> Result<(T, Lease), ApiError> {
        let body = self.fields(request).await?;
        let lease = self.lease(body.text("model")?.as_deref()).await?;
        self.parse_chat(body, lease, parse).await
    }

    /// Reads a request for a model of any kind; what `parse` keeps of its lease keeps it loaded.
    pub(crate) async fn read_any<T: Send + 'static>(
        self: &Arc<Self>,
        request: Request,
        parse: impl FnOnce(&Self, &AnyLease, &mut Body) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let body = self.fields(request).await?;
        let lease = self.lease_any(body.text("model")?.as_deref()).await?;
        let (read, _) = self.parse(body, lease.by_kind(), parse).await?;
        Ok(read)
    }

    /// Reads a request that is to no model.
    pub(crate) async fn read_plain<T: Send + 'static>(
        &self,
        request: Request,
        parse: impl FnOnce(&mut Body) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let mut body = self.fields(request).await?;
        let bytes = body.len();
        let strict = self.config.strict;
        let work = move || {
            let read = parse(&mut body)?;
            Ok((read, body.finish(strict)?))
        };
        let (read, ignored) = self.parse_threads.run(bytes, work).await?;
        note_ignored(ignored);
        Ok(read)
    }

    /// The fields of a request, whose body is read within the limits of size and time.
    pub(crate) async fn fields(&self, request: Request) -> Result<Body, ApiError> {
        let rights = request.extensions().get::<Rights>().copied();
        let (bytes, paid) = self.body(request).await?;
        let length = bytes.len();
        let work = move || Body::new(bytes.into(), paid);
        let body = self.parse_threads.run(length, work).await?;
        let urgent = || body.value("priority").as_f64().is_some_and(|p| p > 0.0);
        if rights.is_some_and(|rights| !rights.priority) && urgent() {
            let message = "priority: this API key may not ask for a priority above 0";
            return Err(ApiError::forbidden(message));
        }
        Ok(body)
    }

    /// The model that a request asks for, as soon as it is there.
    ///
    /// # Errors
    /// Those of [`Models::lease`].
    pub(crate) async fn lease(&self, asked: Option<&str>) -> Result<Lease, ApiError> {
        self.lease_any(asked).await?.decoder()
    }

    /// The same, whatever it does.
    ///
    /// # Errors
    /// Those of [`Models::lease_any`].
    pub(crate) async fn lease_any(
        &self,
        asked: Option<&str>,
    ) -> Result<Lease<LoadedHandle>, ApiError> {
        let record = RequestRecord::current();
        if let (Some(record), Some(asked)) = (&record, asked) {
            // Also where no model has this name.
            record.asks_for(asked);
        }
        let name = self.models.full_name(asked)?;
        if let (Some(record), None) = (&record, asked) {
            record.asks_for(name);
        }
        let trace = record.as_ref().and_then(|record| record.trace());
        if let Some(trace) = trace {
            trace.note("gen_ai.request.model", Attribute::Text(name.to_owned()));
        }
        let began = Instant::now();
        let lease = self.models.lease_any(asked).await;
        if let Some(trace) = trace
            && began.elapsed() >= NOTED_WAIT
        {
            trace.phase("load", began, Instant::now(), Vec::new());
        }
        lease
    }

    /// Reads a request, on a thread that may compute for a while: a long text has many tokens. What waits for
    /// its model has not been read, so it takes no more than its text.
    pub(crate) async fn parse<T: Send + 'static, L: Send + 'static>(
        self: &Arc<Self>,
        mut body: Body,
        lease: L,
        parse: impl FnOnce(&Self, &L, &mut Body) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, L), ApiError> {
        let app = Arc::clone(self);
        let bytes = body.len();
        let work = move || {
            let read = parse(&app, &lease, &mut body)?;
            Ok((read, lease, body.finish(app.config.strict)?))
        };
        let (read, lease, ignored) = self.parse_threads.run(bytes, work).await?;
        note_ignored(ignored);
        Ok((read, lease))
    }

    /// Reads a request with a conversation, and makes its prompt: at once, or when images that are elsewhere have been
    /// fetched.
    pub(crate) async fn parse_chat<T: Send + 'static>(
        self: &Arc<Self>,
        body: Body,
        lease: Lease,
        parse: impl FnOnce(&Self, &Lease, &mut Body) -> Result<PendingPrompt<T>, ApiError>
        + Send
        + 'static,
    ) -> Result<(T, Lease), ApiError> {
        let bytes = body.len();
        let parse = move |app: &Self, lease: &Lease, body: &mut Body| {
            let mut pending = parse(app, lease, body)?;
            let images = match &app.media {
                Some(_) => pending.remote_images(lease)?,
                None => Vec::new(),
            };
            if images.is_empty() {
                return Ok(ChatRead::Whole(pending.finish(lease)?));
            }
            Ok(ChatRead::Waits(Box::new(WaitingChat {
                pending,
                images,
                permits: body.take_permits(),
            })))
        };
        let (read, mut lease) = self.parse(body, lease, parse).await?;
        let mut waiting = match read {
            ChatRead::Whole(read) => return Ok((read, lease)),
            ChatRead::Waits(waiting) => waiting,
        };
        let images = std::mem::take(&mut waiting.images);
        let mut fetched = self.fetch(images, &mut lease).await?;
        let bytes = bytes + fetched.iter().map(|image| image.bytes.len()).sum::<usize>();
        let work = move || {
            let WaitingChat {
                mut pending,
                permits: _permits,
                ..
            } = *waiting;
            pending.put_images(&mut fetched);
            let read = pending.finish(&lease)?;
            Ok((read, lease))
        };
        self.parse_threads.run(bytes, work).await
    }

    /// Fetches images for a request, whose time that takes.
    async fn fetch(
        &self,
        images: Vec<RemoteImage>,
        lease: &mut Lease,
    ) -> Result<Vec<FetchedImage>, ApiError> {
        let Some(fetcher) = &self.media else {
            return Ok(Vec::new());
        };
        let began = Instant::now();
        let left = self.config.request_timeout.saturating_sub(lease.waited);
        let fetched = fetcher.fetch(images, left).await?;
        lease.waited += began.elapsed();
        if let Some(record) = RequestRecord::current()
            && let Some(trace) = record.trace()
        {
            trace.phase("fetch", began, Instant::now(), Vec::new());
        }
        Ok(fetched)
    }

    /// A multipart form, with the body that its file is in.
    pub(crate) async fn form(
        &self,
        request: Request,
    ) -> Result<(Bytes, Form, BodyPermits), ApiError> {
        let headers = request.headers();
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        // A page in a browser can send forms to a server on its own machine without asking.
        let stranger = text("sec-fetch-site").is_some_and(|site| site == "cross-site");
        if stranger && self.config.cors_origins.is_empty() {
            let message = "this server takes no forms of other sites";
            return Err(ApiError::forbidden(message));
        }
        let kind = text(CONTENT_TYPE.as_str()).unwrap_or_default();
        let boundary = multipart::boundary(kind).map(str::to_owned);
        let boundary = boundary.ok_or_else(ApiError::not_form)?;
        let (bytes, paid) = self.bytes(request).await?;
        let form = Form::read(&bytes, &boundary)?;
        Ok((bytes, form, paid))
    }

    /// Does work on a body of `bytes` bytes, on a thread that may take its time.
    pub(crate) async fn read_long<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.parse_threads.run(bytes, work).await
    }

    async fn body(&self, request: Request) -> Result<(Bytes, BodyPermits), ApiError> {
        let kind = request.headers().get(CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()?.split(';').next());
        // A page in a browser can send other types to a server on its own machine without asking.
        if !kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
            return Err(ApiError::not_json());
        }
        self.bytes(request).await
    }

    async fn bytes(&self, request: Request) -> Result<(Bytes, BodyPermits), ApiError> {
        let headers = request.headers();
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let limit = self.config.max_body_bytes;
        let length = text(CONTENT_LENGTH).and_then(|n| n.parse::<usize>().ok());
        if length.is_some_and(|length| length > limit) {
            return Err(ApiError::too_large(limit));
        }
        let read = self.bodies.read(request.into_body());
        let read = tokio::time::timeout(self.config.read_timeout, read).await;
        read.unwrap_or_else(|_| Err(ApiError::slow_body()))
    }
}

/// A request with a conversation.
enum ChatRead<T> {
    Whole(T),
    Waits(Box<WaitingChat<T>>),
}

/// A request that waits for images.
struct WaitingChat<T> {
    pending: PendingPrompt<T>,
    images: Vec<RemoteImage>,
    /// Those of its body.
    permits: BodyPermits,
}

/// Tells the client, and the log, which fields are not followed.
pub(crate) fn note_ignored(ignored: Vec<String>) {
    if let Some(record) = RequestRecord::current()
        && !ignored.is_empty()
    {
        record.ignored(ignored);
    }
}

/// Waits for a model that are worth a span.
const NOTED_WAIT: Duration = Duration::from_millis(1);
