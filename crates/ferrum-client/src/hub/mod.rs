//! Fetching models from a Hugging Face hub into its cache.
//!
//! A pull asks which commit a revision means and which files it has, chooses the files that make the
//! model, and fetches each: its ETag (a hash of its contents) first, then the missing bytes, which are verified against
//! that hash. Weights come last and the revision is written at the very end, so that every model in the cache is
//! complete.

mod api;
mod digest;
mod fetch;
mod retry;

pub use retry::Retries;

use crate::http::{Client, Proxy, Request, Timeouts, Url, header};
use crate::{ClientError, Result};
use api::Listing;
use ferrum_formats::Safetensors;
use ferrum_formats::hub::{
    CachedRepo, DownloadScope, HubCache, ModelName, Revision, Weights, select_files,
};
use fetch::Fetch;
use std::path::PathBuf;

/// Where to fetch from, where to, and how.
#[derive(Debug, Clone)]
pub struct HubConfig {
    /// The hub, such as `https://huggingface.co`.
    pub endpoint: Url,
    /// Access token; sent only to the endpoint, over TLS or loopback.
    pub token: Option<String>,
    /// Where models are kept.
    pub cache: HubCache,
    /// How long the hub may take.
    pub timeouts: Timeouts,
    /// How often it is asked again.
    pub retries: Retries,
    /// Proxy.
    pub proxy: Proxy,
}

/// An event of a pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullEvent<'a> {
    /// A file is being fetched.
    Begin {
        /// Its name in the repository.
        file: &'a str,
        /// Its bytes, where the hub says so.
        total: Option<u64>,
        /// Bytes that were there already.
        done: u64,
    },
    /// So many bytes of it are there.
    Progress(u64),
    /// It is complete.
    End,
    /// Something that a person should know.
    Note(String),
}

/// A model that has been fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    /// What [`ferrum_formats::ModelSource::open`] takes.
    pub path: PathBuf,
    /// The commit.
    pub commit: String,
    /// Files that had to be fetched.
    pub fetched: usize,
}

/// A hub, ready to be asked.
pub struct Hub {
    config: HubConfig,
    client: Client,
    runtime: tokio::runtime::Runtime,
}

impl Hub {
    /// A client of a hub.
    ///
    /// # Errors
    /// [`ClientError::Disk`] when the system has no means to wait for it.
    pub fn new(config: HubConfig) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.map_err(|e| ClientError::disk(config.cache.root(), &e))?;
        let client = Client::new(config.timeouts, config.proxy.clone());
        Ok(Self {
            config,
            client,
            runtime,
        })
    }

    /// Fetches what is missing of a model in the cache.
    ///
    /// # Errors
    /// Whatever stands in the way; what has come stays, and the next pull goes on from there.
    pub fn pull(
        &self,
        model: &ModelName,
        revision: &Revision,
        want: DownloadScope,
        watch: &mut dyn FnMut(PullEvent<'_>),
    ) -> Result<Pulled> {
        self.runtime
            .block_on(self.pull_async(model, revision, want, watch))
    }

    async fn pull_async(
        &self,
        model: &ModelName,
        revision: &Revision,
        want: DownloadScope,
        watch: &mut dyn FnMut(PullEvent<'_>),
    ) -> Result<Pulled> {
        if self.config.token.is_some() && !self.may_have_token() {
            let host = self.config.endpoint.host();
            watch(PullEvent::Note(format!(
                "the token is not sent to {host}, which is not encrypted"
            )));
        }
        let Listing { commit, files } = self.list(model, revision, watch).await?;
        let choice = select_files(model, &files, want)?;
        let repo: CachedRepo = self.config.cache.repo(&model.repo);
        let mut fetch = Fetch {
            hub: self,
            repo: &repo,
            commit: &commit,
            watch,
            fetched: 0,
        };
        for file in &choice.metadata_files {
            fetch.fetch_metadata(file).await?;
        }
        match &choice.weights {
            Weights::None => {}
            Weights::Gguf(files) => {
                for file in files {
                    fetch.fetch_weights(file).await?;
                }
            }
            Weights::Safetensors(file) => fetch.fetch_weights(file).await?,
            Weights::Index(index) => {
                fetch.fetch_metadata(index).await?;
                let shards = Safetensors::shards(repo.snapshot(&commit).join(index))?;
                if let Some(shard) = shards.iter().find(|shard| !files.contains(shard)) {
                    let shard = ferrum_formats::Shown(shard);
                    return Err(ClientError::Damaged {
                        file: index.clone(),
                        what: "shard",
                        found: format!("\"{shard}\""),
                        expected: "a file of the repository".into(),
                    });
                }
                for shard in &shards {
                    fetch.fetch_weights(shard).await?;
                }
            }
        }
        let fetched = fetch.fetched;
        repo.set_commit(revision, &commit)?;
        Ok(Pulled {
            path: repo.entry(&commit, &choice),
            commit: commit.to_string(),
            fetched,
        })
    }

    /// Whether requests to the endpoint may carry the token: by TLS, or to this machine.
    fn may_have_token(&self) -> bool {
        self.config.endpoint.is_tls() || self.config.endpoint.is_loopback()
    }

    /// A request to the endpoint, with the token.
    fn request(&self, method: crate::http::Method, path: &str) -> Result<Request> {
        let base = self.config.endpoint.to_string();
        let url = Url::parse(&format!("{}{path}", base.trim_end_matches('/')))?;
        let mut request = Request::new(method, url);
        // Lengths and hashes are those of the bytes as they are.
        let identity = header::HeaderValue::from_static("identity");
        request.headers.insert(header::ACCEPT_ENCODING, identity);
        if let Some(token) = self
            .config
            .token
            .as_deref()
            .filter(|_| self.may_have_token())
        {
            let value = header::HeaderValue::from_str(&format!("Bearer {token}"));
            let mut value = value.map_err(|_| ClientError::Refused {
                status: 401,
                retry_after: None,
                message: "the hub's token holds characters that no token has".into(),
                hint: "check HF_TOKEN, or the file of --token-file".into(),
            })?;
            value.set_sensitive(true);
            request.headers.insert(header::AUTHORIZATION, value);
        }
        Ok(request)
    }
}
