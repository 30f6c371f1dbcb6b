//! Settings of a server, with defaults that are safe on a machine of one's own.

use crate::http::api_key::ApiKey;
use crate::http::cors::CorsOrigin;
use crate::http::tls::Tls;
use crate::media::MediaDomain;
use crate::observability::otlp::OtlpEndpoint;
use std::path::PathBuf;
use std::time::Duration;

/// Limits and keys.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Keys of which a request must bring one; with none, everybody is served.
    pub api_keys: Vec<ApiKey>,
    /// Keys of which a request must bring one to change the server (load and unload adapters), and which are good
    /// for everything else. With none, the rest of the settings says what requests may change.
    pub admin_keys: Vec<String>,
    /// Sites whose pages may ask.
    pub cors_origins: Vec<CorsOrigin>,
    /// Hosts from which images that requests name by a URL are fetched; with none, requests have to hold their images.
    pub allowed_media_domains: Vec<MediaDomain>,
    /// How long fetching the images of a request may take.
    pub media_timeout: Duration,
    /// What connections are encrypted with, if they are.
    pub tls: Option<Tls>,
    /// Where traces go, if anywhere.
    pub otlp: Option<OtlpEndpoint>,
    /// Further names of models: the alias, and the name of the model. The caller checks that the models exist.
    pub aliases: Vec<(String, String)>,
    /// Whether a request for a name that nothing has is answered by the first model.
    pub any_model_name: bool,
    /// Whether fields that are not followed are refused, rather than told in a header.
    pub strict: bool,
    /// Whether prompts and answers are logged.
    pub log_prompts: bool,
    /// Longest body of a request, in bytes. Images that are fetched for it have as many.
    pub max_body_bytes: usize,
    /// Most bytes of long bodies that are read or parsed at a time, over all requests; at least one body of full length is
    /// always accepted. Images that are fetched have as large a budget of their own.
    pub max_bodies_bytes: usize,
    /// Most bytes of a request's line and headers.
    pub max_header_bytes: usize,
    /// Most connections at a time. Some more are accepted and asked for health and readiness only: everything
    /// else gets 503 there.
    pub max_connections: usize,
    /// Most prompts of a request.
    pub max_prompts: usize,
    /// Most texts of a request for embeddings.
    pub max_inputs: usize,
    /// Most answers of a request, over all its prompts.
    pub max_choices: usize,
    /// Most that a request may say in `max_tokens`. Clients say the largest number they know for no bound.
    pub max_tokens: usize,
    /// The folder from which requests may load LoRA adapters; with none, they may not.
    pub lora_dir: Option<PathBuf>,
    /// Most LoRA adapters at a time.
    pub max_adapters: usize,
    /// Most tokens to draft at a time from what a text already says (prompt lookup); 0: none.
    pub lookup_tokens: usize,
    /// Most bytes of responses that are kept, for requests that go on from them; the oldest go first.
    pub max_stored_bytes: usize,
    /// How long the headers of a request may take, and then its body.
    pub read_timeout: Duration,
    /// How long a connection may be without a request.
    pub idle_timeout: Duration,
    /// How long a client may take nothing of what is written to it, before its connection is closed and what it
    /// asked for is cancelled.
    pub write_timeout: Duration,
    /// How long an answer may take, its time in the queue and the loading of its model included.
    pub request_timeout: Duration,
    /// How long answers may go on after the server was asked to stop.
    pub grace: Duration,
    /// How long the end may take in all, from when the server was asked to stop. Then it gives up whatever hangs.
    /// `None`: 30 seconds more than the grace.
    pub shutdown_timeout: Option<Duration>,
    /// Most models that are loaded at once; `None`: all.
    pub max_loaded_models: Option<usize>,
    /// Most requests that wait for a model to be loaded; further ones are refused.
    pub max_waiting: usize,
    /// How long an idle model stays loaded; `None`: for ever.
    pub idle_unload: Option<Duration>,
    /// How long a model that is never idle keeps its place while another waits for one.
    pub model_min_residency: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            api_keys: Vec::new(),
            admin_keys: Vec::new(),
            cors_origins: Vec::new(),
            allowed_media_domains: Vec::new(),
            media_timeout: Duration::from_secs(10),
            tls: None,
            otlp: None,
            aliases: Vec::new(),
            any_model_name: false,
            strict: false,
            log_prompts: false,
            max_body_bytes: 16 << 20,
            max_bodies_bytes: 256 << 20,
            max_header_bytes: 32 << 10,
            max_connections: 1024,
            max_prompts: 128,
            max_inputs: 2048,
            max_choices: 128,
            max_tokens: i32::MAX as usize,
            lookup_tokens: 0,
            lora_dir: None,
            max_adapters: 16,
            max_stored_bytes: 64 << 20,
            read_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(75),
            write_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(600),
            grace: Duration::from_secs(30),
            shutdown_timeout: None,
            max_loaded_models: None,
            max_waiting: 256,
            idle_unload: None,
            model_min_residency: Duration::from_secs(10),
        }
    }
}
