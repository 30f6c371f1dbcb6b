//! Fetches images that requests name by a URL, from the hosts that an operator lists.
//!
//! A server reaches what its users do not, and users choose the URLs, so nothing is fetched unless hosts are listed. A host
//! that an entry names exactly may be anywhere; of all others only public addresses are connected to, whatever their names
//! resolve to. No redirect is followed. Sizes, times and the number of fetches are bounded, and what fails is an error of its
//! request that names the host, not the URL: its path and query may be secrets.
//!
//! Dropping a fetch closes its connections, so a client that disconnects ends those of its request.

mod domain;

pub use domain::MediaDomain;

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::http::body_budget::{BodyBudget, BytePermits};
use ferrum_client::ClientError;
use ferrum_client::http::header::{ACCEPT, CONNECTION, HeaderValue};
use ferrum_client::http::{Addresses, Client, Method, Request, Response, Timeouts, Url};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

type Result<T> = std::result::Result<T, ApiError>;

/// Most fetches of a request at a time.
const PER_REQUEST: usize = 4;

/// Most fetches of all requests at a time: each takes an open file.
const MAX_FETCHES: usize = 64;

/// Fetches images; see the [module](self).
pub(crate) struct MediaFetcher {
    domains: Vec<MediaDomain>,
    /// For hosts that are listed exactly.
    listed: Client,
    /// For all others.
    public: Client,
    /// Most bytes of the images of a request.
    max_bytes: usize,
    timeout: Duration,
    budget: BodyBudget,
    places: Semaphore,
}

/// An image that is elsewhere.
#[derive(Debug)]
pub(crate) struct RemoteImage {
    /// The field of the request that has it.
    pub(crate) field: String,
    pub(crate) url: String,
}

/// An image as its server sent it.
#[derive(Debug)]
pub(crate) struct FetchedImage {
    pub(crate) media_type: String,
    pub(crate) bytes: Vec<u8>,
    /// Its share of what images may take, for as long as it is there.
    _permits: BytePermits,
}

#[cfg(test)]
impl FetchedImage {
    /// An image that no server sent.
    pub(crate) fn of(media_type: &str, bytes: &[u8]) -> Self {
        Self {
            media_type: media_type.to_owned(),
            bytes: bytes.to_vec(),
            _permits: BytePermits::default(),
        }
    }
}

/// What the fetches of a request share.
struct Shared {
    deadline: Instant,
    /// How long that is from the first fetch.
    time: Duration,
    /// Bytes that may still come.
    room: AtomicUsize,
}

/// An image of an allowed host.
struct Target {
    field: String,
    url: Url,
    is_listed: bool,
}

impl MediaFetcher {
    /// `None` where no host is listed.
    pub(crate) fn new(config: &ServerConfig) -> Option<Arc<Self>> {
        if config.allowed_media_domains.is_empty() {
            return None;
        }
        // The deadline of a request comes first; this ends connections that the pool opens in the background.
        let limit = config.media_timeout.saturating_mul(2);
        let timeouts = Timeouts {
            connect: limit,
            response: limit,
            read: limit,
        };
        Some(Arc::new(Self {
            domains: config.allowed_media_domains.clone(),
            listed: Client::direct(timeouts, Addresses::Any),
            public: Client::direct(timeouts, Addresses::Public),
            max_bytes: config.max_body_bytes,
            timeout: config.media_timeout,
            budget: BodyBudget::new(config.max_body_bytes, config.max_bodies_bytes),
            places: Semaphore::new(MAX_FETCHES),
        }))
    }

    /// Fetches the images of a request, which has `left` for its answer. They come in the order of `images`.
    ///
    /// # Errors
    /// 400 about the first image that cannot be had, 503 where images of other requests leave no memory or no time, 504 where
    /// the time of the answer is over.
    pub(crate) async fn fetch(
        self: &Arc<Self>,
        images: Vec<RemoteImage>,
        left: Duration,
    ) -> Result<Vec<FetchedImage>> {
        // Nothing is fetched for a request that is refused.
        let targets = images.into_iter().map(|image| self.target(image));
        let targets = targets.collect::<Result<Vec<_>>>()?;
        let mut targets = targets.into_iter().enumerate();
        let time = self.timeout.min(left);
        let shared = Arc::new(Shared {
            deadline: Instant::now() + time,
            time,
            room: AtomicUsize::new(self.max_bytes),
        });
        let mut tasks = JoinSet::new();
        let mut fetched = Vec::with_capacity(targets.len());
        loop {
            while tasks.len() < PER_REQUEST
                && let Some((index, target)) = targets.next()
            {
                let (fetcher, shared) = (Arc::clone(self), Arc::clone(&shared));
                tasks.spawn(async move { (index, fetcher.fetch_one(&target, &shared).await) });
            }
            // At an error the set is dropped, which aborts the others.
            let Some(ended) = tasks.join_next().await else {
                break;
            };
            let failed = |_| ApiError::internal("an image could not be fetched");
            let (index, image) = ended.map_err(failed)?;
            fetched.push((index, image?));
        }
        fetched.sort_by_key(|(index, _)| *index);
        Ok(fetched.into_iter().map(|(_, image)| image).collect())
    }

    /// Where an image is, if it may be fetched from there.
    fn target(&self, RemoteImage { field, url }: RemoteImage) -> Result<Target> {
        let url = Url::parse(url.trim()).map_err(|e| {
            let reason = match e {
                ClientError::Url { reason, .. } => reason,
                _ => "expected something like https://host/path",
            };
            ApiError::no_media(&field, format!("the URL is not usable: {reason}"))
        })?;
        let (host, port) = (url.host(), url.port());
        let mut allowing = self
            .domains
            .iter()
            .filter(|domain| domain.allows(host, port));
        let Some(first) = allowing.next() else {
            let reason = format!(
                "images are not fetched from {host:?} at port {port}, which --allowed-media-domains of this server does not \
                 name; expected a data URL (data:image/png;base64,…), or another host"
            );
            return Err(ApiError::unsupported(field, reason));
        };
        Ok(Target {
            is_listed: first.is_exact() || allowing.any(MediaDomain::is_exact),
            field,
            url,
        })
    }

    async fn fetch_one(&self, target: &Target, shared: &Shared) -> Result<FetchedImage> {
        let place = timeout_at(shared.deadline, self.places.acquire()).await;
        // The semaphore is never closed.
        let _place = place.map_err(|_| ApiError::many_fetches())?;
        // The time that waiting for other fetches leaves, in tenths of a second.
        let time = shared.deadline.saturating_duration_since(Instant::now());
        let time = Duration::from_millis(100).mul_f64((time.as_secs_f64() * 10.0).ceil().max(1.0));
        let work = async {
            let response = self.request(target).await?;
            self.read(target, response, &shared.room).await
        };
        let late = |_| match shared.time < self.timeout {
            true => ApiError::timeout(),
            false => target.failed(format!("did not send the image within {time:?}")),
        };
        timeout_at(shared.deadline, work).await.map_err(late)?
    }

    async fn request(&self, target: &Target) -> Result<Response> {
        let mut request = Request::new(Method::GET, target.url.clone());
        let headers = &mut request.headers;
        headers.insert(ACCEPT, HeaderValue::from_static("image/*"));
        // Users choose the hosts: connections that wait for another request could take all open files.
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        let client = match target.is_listed {
            true => &self.listed,
            false => &self.public,
        };
        let response = client.send(&request).await;
        let response = response.map_err(|e| target.client_failed("cannot be reached", e))?;
        let status = response.status.as_u16();
        match response.status {
            ok if ok.is_success() => Ok(response),
            other if other.is_redirection() => Err(target.failed(format!(
                "answers with a redirect ({status}), which is not followed; expected the image"
            ))),
            _ => Err(target.failed(format!("answers with {status}; expected the image"))),
        }
    }

    async fn read(
        &self,
        target: &Target,
        mut response: Response,
        room: &AtomicUsize,
    ) -> Result<FetchedImage> {
        let most = self.max_bytes;
        let too_large = |found: String| {
            target.failed(format!(
                "sends {found} bytes; expected at most {most} of all images of the request"
            ))
        };
        let announced = response.number("content-length").unwrap_or(0);
        if announced > room.load(Relaxed) as u64 {
            return Err(too_large(announced.to_string()));
        }
        let (mut bytes, mut permits) = (Vec::new(), BytePermits::default());
        let media_type = media_type(response.header("content-type"));
        let cut = |e| target.client_failed("did not send the whole image", e);
        while let Some(chunk) = response.chunk().await.map_err(cut)? {
            let taken = room.fetch_update(Relaxed, Relaxed, |room| room.checked_sub(chunk.len()));
            taken.map_err(|_| too_large("too many".into()))?;
            self.budget.acquire(&mut permits, chunk.len()).await?;
            bytes.extend_from_slice(&chunk);
        }
        Ok(FetchedImage {
            media_type,
            bytes,
            _permits: permits,
        })
    }
}

impl Target {
    /// What its host did.
    fn failed(&self, did: impl AsRef<str>) -> ApiError {
        let reason = format!("{} {}", self.url.host(), did.as_ref());
        ApiError::no_media(&self.field, reason)
    }

    /// What its host did not do, and why.
    fn client_failed(&self, what: &str, error: ClientError) -> ApiError {
        let why = match error {
            ClientError::NotPublic { .. } => {
                let did = "has no public address, and --allowed-media-domains of this server does not name it exactly";
                return self.failed(did);
            }
            ClientError::Unreachable { reason, .. } | ClientError::Protocol { reason, .. } => {
                // Hints are for the operator of the server.
                reason.lines().next().unwrap_or_default().to_owned()
            }
            ClientError::Timeout { what, .. } => format!("nothing came while {what}"),
            // Others are not about requests; they would tell the URL.
            _ => return self.failed(what),
        };
        self.failed(format!("{what}: {why}"))
    }
}

/// The type that a server tells, or one that says nothing.
fn media_type(header: Option<&str>) -> String {
    let known = |c: char| c.is_ascii_alphanumeric() || "/+.-".contains(c);
    let told = header.and_then(|text| text.split(';').next());
    let told = told
        .map(str::trim)
        .filter(|text| text.starts_with("image/") && text.len() <= 64 && text.chars().all(known));
    told.unwrap_or("application/octet-stream").to_owned()
}
