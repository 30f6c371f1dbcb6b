//! Connections: accepting them within bounds, and ending them gently.

use crate::app::{self, App};
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::models::{ModelLoader, ModelSummary};
use crate::otlp::{Exporter, Shipper};
use crate::tls::Tls;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};

/// How long the last bytes of answers may take when all is done.
const FLUSH: Duration = Duration::from_secs(5);

/// A pause when no connection can be accepted, as when there are no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves models on one listener.
pub struct Server {
    app: Arc<App>,
    router: axum::Router,
    places: Arc<Semaphore>,
    http: http1::Builder,
    shipper: Option<Shipper>,
}

impl Server {
    /// A server that has not begun, for models of these names, which must differ. The first is meant by
    /// requests that name none; none is loaded yet.
    pub fn new(names: Vec<String>, loader: Arc<dyn ModelLoader>, config: ServerConfig) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(config.read_timeout)
            // hyper refuses buffers below 8 KiB.
            .max_buf_size(config.max_header_bytes.max(8 << 10));
        let places = Arc::new(Semaphore::new(config.max_connections));
        let traces = config.otlp.clone().map(Exporter::new);
        let (exporter, shipper) = traces.unzip();
        let app = Arc::new(App::new(names, loader, config, exporter));
        Self {
            router: app::router(Arc::clone(&app)),
            app,
            places,
            http,
            shipper,
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
        self.app.models.give_adapter(name, dir).await
    }

    /// Answers until `stop` is ready. Then new requests are refused while the answers that have begun
    /// go on, for at most the configured grace; health can be asked all the while. At the end all models
    /// are unloaded.
    pub async fn serve(mut self, listener: TcpListener, stop: impl Future<Output = ()>) {
        let connections = GracefulShutdown::new();
        let (all_told, told) = oneshot::channel();
        let shipping = self.shipper.take();
        let shipping = shipping.map(|shipper| tokio::spawn(shipper.run(told)));
        let models = Arc::clone(&self.app.models);
        let housekeeping = tokio::spawn(Arc::clone(&models).keep_house());
        tokio::select! {
            never = self.accept(&listener, &connections) => match never {},
            () = stop => {}
        }
        housekeeping.abort();
        models.drain();
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
    }

    async fn accept(&self, listener: &TcpListener, connections: &GracefulShutdown) -> Infallible {
        loop {
            let place = Arc::clone(&self.places).acquire_owned().await;
            let Ok((stream, _)) = listener.accept().await else {
                sleep(ACCEPT_PAUSE).await;
                continue;
            };
            // Chunks are small and each is wanted at once; a socket that cannot do that still works.
            let _ = stream.set_nodelay(true);
            let config = &self.app.config;
            let tls = config.tls.as_ref().map(Tls::acceptor);
            let (http, router) = (self.http.clone(), self.router.clone());
            let (patience, watcher) = (config.read_timeout, connections.watcher());
            // What goes wrong with a connection is the client's to see.
            tokio::spawn(async move {
                match tls {
                    None => answer(stream, http, router, watcher).await,
                    Some(tls) => {
                        if let Ok(Ok(stream)) = timeout(patience, tls.accept(stream)).await {
                            answer(stream, http, router, watcher).await;
                        }
                    }
                }
                drop(place);
            });
        }
    }
}

/// Answers the requests of a connection until it ends.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    http: http1::Builder,
    router: axum::Router,
    watcher: Watcher,
) {
    let service = TowerToHyperService::new(router);
    let connection = http.serve_connection(TokioIo::new(stream), service);
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
