//! Connections: accepting them within bounds, and ending them gently.

use crate::app::{self, App};
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::model::ServedModel;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

/// How long the last bytes of answers may take when all is done.
const FLUSH: Duration = Duration::from_secs(5);

/// A pause when no connection can be accepted, as when there are no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves one model on one listener.
pub struct Server {
    app: Arc<App>,
    router: axum::Router,
    places: Arc<Semaphore>,
    http: http1::Builder,
}

impl Server {
    /// A server that has not begun.
    pub fn new(model: ServedModel, config: ServerConfig) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(config.read_timeout)
            // hyper refuses buffers below 8 KiB.
            .max_buf_size(config.max_header_bytes.max(8 << 10));
        let places = Arc::new(Semaphore::new(config.max_connections));
        let app = Arc::new(App::new(model, config));
        Self {
            router: app::router(Arc::clone(&app)),
            app,
            places,
            http,
        }
    }

    /// Loads a LoRA adapter, which requests choose as the model `name`.
    ///
    /// # Errors
    /// What is wrong with the name or the adapter.
    pub async fn load_adapter(&self, name: &str, dir: &Path) -> Result<(), ApiError> {
        let most = self.app.config.max_adapters;
        self.app.model.load_adapter(name, dir, most).await
    }

    /// Answers until `stop` is ready. Then new requests are refused while the answers that have begun
    /// go on, for at most the configured grace; health can be asked all the while.
    pub async fn serve(self, listener: TcpListener, stop: impl Future<Output = ()>) {
        let connections = GracefulShutdown::new();
        tokio::select! {
            never = self.accept(&listener, &connections) => match never {},
            () = stop => {}
        }
        self.app.drain();
        let engine = self.app.model.served.engine.clone();
        tokio::select! {
            never = self.accept(&listener, &connections) => match never {},
            () = engine.stopped() => {}
            () = sleep(self.app.config.grace) => {}
        }
        drop(listener);
        // Who does not read its answer to the end by then is cut off.
        let _ = timeout(FLUSH, connections.shutdown()).await;
    }

    async fn accept(&self, listener: &TcpListener, connections: &GracefulShutdown) -> Infallible {
        loop {
            let place = Arc::clone(&self.places).acquire_owned().await;
            match listener.accept().await {
                Ok((stream, _)) => {
                    let connection = self.connection(stream, connections);
                    tokio::spawn(async move {
                        // What goes wrong with a connection is the client's to see.
                        let _ = pin!(connection).await;
                        drop(place);
                    });
                }
                Err(_) => sleep(ACCEPT_PAUSE).await,
            }
        }
    }

    fn connection(
        &self,
        stream: TcpStream,
        connections: &GracefulShutdown,
    ) -> impl Future<Output = hyper::Result<()>> + Send + 'static {
        // Chunks are small and each is wanted at once; a socket that cannot do that still works.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(self.router.clone());
        let connection = self.http.serve_connection(TokioIo::new(stream), service);
        connections.watch(connection)
    }
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
