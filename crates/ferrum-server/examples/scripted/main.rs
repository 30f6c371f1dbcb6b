//! Serves a model that says what a script has it say: `scripted SCRIPT [--context TOKENS] [--port PORT]`.
//!
//! `tools/clients/claude_code.py` and `codex.py` run whole tasks of agents against it: the server and the engine are
//! those of `ferrum serve`, and the model has a context that holds an agent's instructions. SCRIPT is a JSON file with
//! the fields of [`Script`](model::Script). The first line on stdout is the address; SIGTERM ends the server.

mod model;

use ferrum_server::{Server, ServerConfig, stop_signal};
use model::Script;
use std::error::Error;
use std::io::Write;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;

/// The name of the model.
const NAME: &str = "scripted";

/// What the command line says.
struct Arguments {
    script: Script,
    context: usize,
    port: u16,
}

impl Arguments {
    fn read(words: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let (mut script, mut context, mut port) = (None, 32_768, 0);
        let mut words = words.skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            match &*word {
                "--context" => context = value()?.parse()?,
                "--port" => port = value()?.parse()?,
                path => {
                    script =
                        Some(std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?)
                }
            }
        }
        let script = script.ok_or("usage: scripted SCRIPT [--context TOKENS] [--port PORT]")?;
        Ok(Self {
            script: serde_json::from_str(&script)?,
            context,
            port,
        })
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    let Arguments {
        script,
        context,
        port,
    } = Arguments::read(std::env::args())?;
    let stop = stop_signal()?;
    let loaded = Mutex::new(Some(model::load(script, context)?));
    let loader = move |_: &str| {
        let loaded = loaded.lock().map_err(|e| e.to_string())?.take();
        loaded.ok_or_else(|| "it was loaded before".to_owned())
    };
    let server = Server::new(
        vec![NAME.to_owned()],
        Arc::new(loader),
        ServerConfig::default(),
    );
    server.load(NAME).await?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    writeln!(std::io::stdout(), "http://{}", listener.local_addr()?)?;
    server.serve(listener, stop).await?;
    Ok(())
}
