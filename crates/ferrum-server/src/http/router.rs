//! The router, with what surrounds every request: its id and record, the check of its key, and its count.

use crate::error::ApiError;
use crate::http::app::App;
use crate::http::auth::{self, Rights};
use crate::http::cors;
use crate::http::request_id::{REQUEST_ID, RequestId};
use crate::observability::metrics::HttpLabels;
use crate::observability::record::RequestRecord;
use crate::observability::span::Attribute;
use crate::observability::trace::RequestTrace;
use crate::{paths, routes};
use axum::Router;
use axum::body::Body as HttpBody;
use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::http::header::{CONTENT_LENGTH, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use tracing::Instrument;

/// The fields of a request that are not followed.
const IGNORED: HeaderName = HeaderName::from_static("x-ferrum-ignored");

/// Marks requests that came on a connection beyond the limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reserved;

/// Methods that answers are counted by.
const KNOWN_METHODS: [Method; 7] = [
    Method::GET,
    Method::POST,
    Method::PUT,
    Method::DELETE,
    Method::HEAD,
    Method::OPTIONS,
    Method::PATCH,
];

/// All routes with their checks.
pub(crate) fn router(app: Arc<App>) -> Router {
    let checked = from_fn_with_state(Arc::clone(&app), check);
    let observed = from_fn_with_state(Arc::clone(&app), observe);
    let cors = cors::layer(&app.config.cors_origins);
    let add = |router: Router<Arc<App>>, (path, methods)| router.route(path, methods);
    let router = routes::table().into_iter().fold(Router::new(), add);
    let router = router
        .fallback(|request: Request| async move {
            ApiError::no_route(request.method().as_str(), request.uri().path())
        })
        .method_not_allowed_fallback(|request: Request| async move {
            ApiError::wrong_method(request.method().as_str(), request.uri().path())
        })
        .layer(checked)
        .with_state(app);
    // What is layered last is asked first.
    let router = match cors {
        Some(cors) => router.layer(cors),
        None => router,
    };
    router.layer(observed)
}

/// The route of a request, as the table has it.
fn route_of(request: &Request<HttpBody>) -> String {
    let route = request.extensions().get::<MatchedPath>();
    route.map_or("none", MatchedPath::as_str).to_owned()
}

/// Around everything else: the id of a request, and its record.
async fn observe(State(app): State<Arc<App>>, request: Request<HttpBody>, next: Next) -> Response {
    let id = RequestId::of(request.headers());
    let (method, route) = (request.method().clone(), route_of(&request));
    let header = id.header();
    let span = tracing::info_span!("request", request_id = id.as_str());
    let record = RequestRecord::begin(id, method, route, app.config.log_prompts);
    let record = Arc::new(record);
    let work = Arc::clone(&record).scope(next.run(request));
    let mut response = work.instrument(span).await;
    if let Some(id) = header {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if let Some(names) = record.ignored_header() {
        response.headers_mut().insert(IGNORED, names);
    }
    record.answered(response.status());
    response
}

/// Before a request its key, after it the count.
async fn check(
    State(app): State<Arc<App>>,
    mut request: Request<HttpBody>,
    next: Next,
) -> Response {
    let record = RequestRecord::current();
    let route = route_of(&request);
    let method = request.method().clone();
    let anthropic = paths::is_anthropic(request.uri().path());
    let full = request.extensions().get::<Reserved>().is_some();
    let allowed = rights(&app, &route, &request);
    let allowed = allowed.map(|rights| {
        request.extensions_mut().insert(rights);
    });
    if let (Some(record), Ok(())) = (&record, &allowed)
        && let Some(trace) = trace_of(&app, &method, &route, &request)
    {
        record.traced(trace);
    }
    let mut response = match allowed {
        Ok(()) => next.run(request).await,
        Err(_) if !full && route == paths::PAGE && method == Method::GET => app.page.locked(),
        Err(error) => error.into_response(),
    };
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        if let Some(record) = &record {
            record.failed(&error);
        }
        if anthropic {
            let (mut head, _) = response.into_parts();
            head.headers.remove(CONTENT_LENGTH);
            let body = serde_json::to_vec(&error.anthropic_body()).unwrap_or_default();
            response = Response::from_parts(head, HttpBody::from(body));
        }
    }
    // Errors repeat what clients sent, and browsers like to guess.
    let headers = response.headers_mut();
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    // Methods are as many as a client invents, and each would be kept for ever; routes are ours.
    let method = match route.as_str() {
        "none" => "any",
        _ if KNOWN_METHODS.contains(&method) => method.as_str(),
        _ => "other",
    };
    let labels = HttpLabels {
        handler: route,
        method: method.to_owned(),
        status: response.status().as_u16(),
    };
    app.http.get_or_create(&labels).inc();
    response
}

/// What a request may do on a route, if it may be there at all.
fn rights(app: &App, route: &str, request: &Request<HttpBody>) -> Result<Rights, ApiError> {
    if route == paths::HEALTH {
        return Ok(Rights::NONE);
    }
    let full = request.extensions().get::<Reserved>().is_some();
    if full && !paths::RESERVED.contains(&route) {
        return Err(ApiError::no_connection());
    }
    let rights = auth::check(&app.config, request.headers())?;
    match paths::ADMINISTRATIVE.contains(&route) && !rights.admin {
        true => Err(auth::not_admin(request.headers())),
        false => Ok(rights),
    }
}

/// The trace of a request, if there is a collector. Only POST requests are traced.
fn trace_of(
    app: &App,
    method: &Method,
    route: &str,
    request: &Request<HttpBody>,
) -> Option<RequestTrace> {
    let exporter = app.exporter.as_ref().filter(|_| method == Method::POST)?;
    let trace = RequestTrace::begin(exporter, format!("POST {route}"), request.headers())?;
    let text = |text: &str| Attribute::Text(text.to_owned());
    trace.note("http.request.method", text("POST"));
    trace.note("http.route", text(route));
    Some(trace)
}
