//! Connections: accepting them within bounds, and ending them gently.

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::http::app::App;
use crate::http::router::{Reserved, router};
use crate::http::tls::Tls;
use crate::http::transport::{Activity, TimeoutStream, Timeouts, counted};
use crate::models::{ModelLoader, ModelSummary};
use crate::observability::otlp::{BatchExporter, Exporter};
use crate::paths::trim_path;
use axum::Extension;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

/// How long the last bytes of answers may take when all is done.
const FLUSH: Duration = Duration::from_secs(5);

/// How long the end may take beyond the grace, where nothing is said of that.
const SHUTDOWN: Duration = Duration::from_secs(30);

/// A pause when no connection can be accepted, as when there are no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections beyond the limit that are answered all the same, so that health can be asked of a full server.
const RESERVED: usize = 128;

/// How long one of them may last in all, and how long it lasts at least while others wait for its place.
const RESERVED_TIME: Duration = Duration::from_secs(10);
const RESERVED_TURN: Duration = Duration::from_secs(1);

/// How often it is looked whether one of them has ended, while others wait.
const RESERVED_LOOK: Duration = Duration::from_millis(5);

/// A server that was asked to stop and could not end in time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the server did not end within {} s of being asked to{}",
    waited.as_secs(),
    Self::reason(models)
)]
pub struct ShutdownError {
    /// How long it was waited for.
    pub waited: Duration,
    /// Models whose engines had not ended.
    pub models: Vec<String>,
}

impl ShutdownError {
    fn reason(models: &[String]) -> String {
        match models {
            [] => String::new(),
            models => format!(
                ": still at work or in a step that hangs: the engine of {}",
                models.join(", ")
            ),
        }
    }
}

/// Serves models on one listener.
pub struct Server {
    app: Arc<App>,
    /// For connections within the limit, and for those beyond it.
    classes: [ConnectionClass; 2],
    places: Arc<Semaphore>,
    batch_exporter: Option<BatchExporter>,
}

/// How the requests of a connection are answered.
#[derive(Clone)]
struct ConnectionClass {
    router: axum::Router,
    http: http1::Builder,
}

impl Server {
    /// A server that has not begun, for models of these names, which must differ. The first is meant by
    /// requests that name none; none is loaded yet.
    pub fn new(names: Vec<String>, loader: Arc<dyn ModelLoader>, config: ServerConfig) -> Self {
        let mut http = http1::Builder::new();
        // `TimeoutStream` limits the time of headers: it tells idle connections from slow ones.
        http.header_read_timeout(None)
            // hyper refuses buffers below 8 KiB.
            .max_buf_size(config.max_header_bytes.max(8 << 10));
        let places = Arc::new(Semaphore::new(config.max_connections));
        let traces = config.otlp.clone().map(Exporter::new);
        let (exporter, batch_exporter) = traces.unzip();
        let app = Arc::new(App::new(names, loader, config, exporter));
        let router = router(Arc::clone(&app));
        let mut once = http.clone();
        once.keep_alive(false);
        let reserved = ConnectionClass {
            router: router.clone().layer(Extension(Reserved)),
            http: once,
        };
        Self {
            classes: [ConnectionClass { router, http }, reserved],
            app,
            places,
            batch_exporter,
        }
    }

    /// Loads a model before anybody asks for it.
    ///
    /// # Errors
    /// As the loader says them.
    pub async fn load(&self, name: &str) -> Result<(), String> {
        self.app.models.preload(name).await
    }

    /// The models in the order in which they were given.
    pub fn models(&self) -> Vec<ModelSummary> {
        self.app.models.summaries()
    }

    /// Gives the first model a LoRA adapter, which requests choose as the model `name`. It is loaded when
    /// the model is.
    ///
    /// # Errors
    /// What is wrong with the name or the adapter.
    pub async fn load_adapter(&self, name: &str, dir: &Path) -> Result<(), ApiError> {
        self.app.models.add_startup_adapter(name, dir).await
    }

    /// Answers until `stop` is ready. Then new requests are refused while the answers that have begun
    /// go on, for at most the configured grace; health can be asked all the while. At the end all models
    /// are unloaded.
    ///
    /// # Errors
    /// [`ShutdownError`] when the end takes longer than it may: a step of an engine hangs, say. The process should
    /// end then; threads of it may not.
    pub async fn serve(
        mut self,
        listener: TcpListener,
        stop: impl Future<Output = ()>,
    ) -> Result<(), ShutdownError> {
        let connections = GracefulShutdown::new();
        let (all_told, told) = oneshot::channel();
        let shipping = self.batch_exporter.take();
        let shipping = shipping.map(|batch_exporter| tokio::spawn(batch_exporter.run(told)));
        let models = Arc::clone(&self.app.models);
        let housekeeping = tokio::spawn(Arc::clone(&models).unload_idle_models());
        tokio::select! {
            never = self.accept(&listener, &connections) => match never {},
            () = stop => {}
        }
        housekeeping.abort();
        models.drain();
        let config = &self.app.config;
        let waited = config.shutdown_timeout;
        let waited = waited.unwrap_or_else(|| config.grace.saturating_add(SHUTDOWN));
        let end = async {
            tokio::select! {
                never = self.accept(&listener, &connections) => match never {},
                () = models.stopped() => {}
                () = sleep(self.app.config.grace) => {}
            }
            drop(listener);
            // Who does not read its answer to the end by then is cut off.
            let _ = timeout(FLUSH, connections.shutdown()).await;
            if let Some(shipping) = shipping {
                let _ = all_told.send(());
                let _ = timeout(FLUSH, shipping).await;
            }
            models.shut_down().await;
        };
        if timeout(waited, end).await.is_ok() {
            return Ok(());
        }
        let models_left = models.unended();
        models.abandon();
        Err(ShutdownError {
            waited,
            models: models_left,
        })
    }

    async fn accept(&self, listener: &TcpListener, connections: &GracefulShutdown) -> Infallible {
        let mut reserved = ReservedTasks::default();
        let [full, beyond] = &self.classes;
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                reserved.end_oldest();
                sleep(ACCEPT_PAUSE).await;
                continue;
            };
            // Chunks are small and each is wanted at once; a socket that cannot do that still works.
            let _ = stream.set_nodelay(true);
            match Arc::clone(&self.places).try_acquire_owned() {
                Ok(place) => {
                    let answer = self.answer(stream, full, connections.watcher());
                    tokio::spawn(async move {
                        answer.await;
                        drop(place);
                    });
                }
                Err(_) => {
                    reserved.make_room().await;
                    let answer = self.answer(stream, beyond, connections.watcher());
                    reserved.add(tokio::spawn(timeout(RESERVED_TIME, answer)).abort_handle());
                }
            }
        }
    }

    /// Answers the requests of a connection until it ends.
    fn answer(
        &self,
        stream: TcpStream,
        class: &ConnectionClass,
        watcher: Watcher,
    ) -> impl Future<Output = ()> + Send + use<> {
        let config = &self.app.config;
        let timeouts = Timeouts {
            head: config.read_timeout,
            idle: config.idle_timeout,
            write: config.write_timeout,
        };
        let activity = Arc::new(Activity::default());
        let stream = TimeoutStream::new(stream, timeouts, Arc::clone(&activity));
        let tls = config.tls.as_ref().map(Tls::acceptor);
        let (class, patience) = (class.clone(), config.read_timeout);
        // What goes wrong with a connection is the client's to see.
        async move {
            match tls {
                None => http(stream, class, activity, watcher).await,
                Some(tls) => {
                    if let Ok(Ok(stream)) = timeout(patience, tls.accept(stream)).await {
                        http(stream, class, activity, watcher).await;
                    }
                }
            }
        }
    }
}

/// The connections beyond the limit, the oldest first. What asks for something is answered at once and ends, unless it
/// has more of a body to send; what only holds a connection or sends does so for a turn.
#[derive(Default)]
struct ReservedTasks(VecDeque<(Instant, AbortHandle)>);

impl ReservedTasks {
    /// Waits until there is room for one more.
    async fn make_room(&mut self) {
        while self.0.len() >= RESERVED {
            self.0.retain(|(_, task)| !task.is_finished());
            let oldest = self.0.front().filter(|_| self.0.len() >= RESERVED);
            match oldest.map(|(since, _)| since.elapsed() >= RESERVED_TURN) {
                Some(true) => self.end_oldest(),
                Some(false) => sleep(RESERVED_LOOK).await,
                None => return,
            }
        }
    }

    fn add(&mut self, task: AbortHandle) {
        self.0.push_back((Instant::now(), task));
    }

    fn end_oldest(&mut self) {
        if let Some((_, task)) = self.0.pop_front() {
            task.abort();
        }
    }
}

async fn http(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    class: ConnectionClass,
    activity: Arc<Activity>,
    watcher: Watcher,
) {
    let routes = TowerToHyperService::new(class.router);
    let trimmed = service_fn(move |mut request| {
        // Before a route is looked for, so that nothing behind knows of two names for it.
        trim_path(&mut request);
        routes.call(request)
    });
    let service = counted(trimmed, activity);
    let connection = class.http.serve_connection(TokioIo::new(stream), service);
    let _ = watcher.watch(connection).await;
}

/// Is ready when the process is asked to stop: by SIGTERM or Ctrl-C.
///
/// # Errors
/// Those of the system, when it does not let us listen.
pub fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    #[cfg(unix)]
    let mut term = {
        use tokio::signal::unix::{SignalKind, signal};
        signal(SignalKind::terminate())?
    };
    Ok(async move {
        #[cfg(unix)]
        tokio::select! {
            _ = term.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        #[cfg(not(unix))]
        let _ = tokio::signal::ctrl_c().await;
    })
}
