//! The server as a client meets it: over a socket, with the demo model behind it.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod adapters;
mod agents;
mod anthropic;
mod chat;
mod completions;
mod cors;
mod documented;
mod embeddings;
mod encoders;
mod faults;
mod hooked;
mod infill;
mod llama_cpp;
mod media;
mod models;
mod operations;
mod page;
mod refusals;
mod responses;
mod routes;
#[path = "../../examples/scripted/model.rs"]
mod scripted;
mod speech;
mod structured;
mod tls;
mod traces;
mod transport;
mod vision;

use ferrum_engine::{
    BackendDispatch, BackendKind, BackendOptions, Engine, EngineConfig, EngineHandle, KvDtype,
    StepRunner,
};
use ferrum_formats::chat_template::ChatTemplate;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_formats::{Gguf, ModelSource};
use ferrum_models::{
    DenseLayers, EmbeddingPrompts, KvLayout, Model, RunnerConfig, StatedPooling, read_model,
};
use ferrum_server::{LoadedModel, ModelLoader, ServedModel, Server, ServerConfig, ShutdownError};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

static DEMO: &[u8] = include_bytes!("../../../../assets/demo/ferrum-demo.gguf");

/// A template that can have the model think first.
const THINKING: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}";

/// The templates of these tests need no special tokens.
const NO_SPECIALS: [(&str, &str); 0] = [];

/// The type of streamed answers.
const EVENTS: &str = "text/event-stream";

/// Longest sequence of the test engine.
const CONTEXT: usize = 512;

/// Long enough for any machine; only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(120);

/// The demo model with its tokenizer and template.
fn demo_model() -> (Model, (Tokenizer, Option<ChatTemplate>)) {
    let gguf = Gguf::from_static(DEMO).unwrap();
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    let template = ChatTemplate::from_gguf(&gguf, &tokenizer).unwrap();
    let model = read_model(ModelSource::Gguf(gguf)).unwrap();
    (model, (tokenizer, template))
}

/// A loaded model, on the runner that `wrap` makes of its own.
fn load(
    model: Model,
    (tokenizer, template): (Tokenizer, Option<ChatTemplate>),
    (engine, max_seqs): (EngineConfig, usize),
    wrap: impl FnOnce(Box<dyn StepRunner>) -> Box<dyn StepRunner>,
) -> LoadedModel {
    let tokenizer = Arc::new(tokenizer);
    let sizes = RunnerConfig {
        context: CONTEXT,
        max_seqs,
        max_tokens: 64,
        max_logit_rows: 64,
        kv_tokens: CONTEXT * max_seqs,
        kept_states: 0,
        layout: KvLayout::Paged { block_size: 16 },
        profile: false,
    };
    let options = BackendOptions {
        threads: Some(1),
        ..BackendOptions::default()
    };
    let device = BackendDispatch::from_kind(BackendKind::Cpu, options).unwrap();
    let session = device
        .load(&model, sizes, KvDtype::F32, &mut |_, _| ())
        .unwrap();
    let runner = wrap(session.into_runner());
    let engine = Engine::start(runner, Some(Arc::clone(&tokenizer)), engine).unwrap();
    let pooling = StatedPooling::of(&model.source).unwrap();
    let dense = DenseLayers::of(&model.source, model.spec.hidden_size).unwrap();
    let model = ServedModel {
        open_schemas: false,
        engine: engine.handle(),
        template,
        call_format: None,
        context: CONTEXT,
        vision: None,
        vocab_size: model.spec.vocab_size,
        generates: model.generates(),
        pooling: pooling.or(model.usual_pooling()),
        embedding_size: dense.dimensions(model.spec.hidden_size),
        dense,
        prompts: EmbeddingPrompts::of(&model.source).unwrap(),
        stop_tokens: tokenizer.eos_ids().to_vec(),
        sampling: ferrum_engine::SamplingParams::default(),
        tokenizer,
    };
    LoadedModel::Decoder(engine, Box::new(model))
}

/// The engine of a model that generates.
fn handle_of(loaded: &LoadedModel) -> EngineHandle {
    match loaded {
        LoadedModel::Decoder(engine, _) => engine.handle(),
        _ => unreachable!("the test has a decoder"),
    }
}

/// A server on a thread of its own, on a free port.
struct Running {
    address: SocketAddr,
    /// Of the first model that was loaded before the server began, if one was.
    engine: Option<EngineHandle>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), ShutdownError>>>,
}

impl Running {
    fn start(config: ServerConfig, engine: EngineConfig, max_seqs: usize) -> Self {
        let (model, text) = demo_model();
        Self::with(model, text, config, (engine, max_seqs), |runner| runner)
    }

    /// Serves `model` as "demo", on the runner that `wrap` makes of its own.
    fn with(
        model: Model,
        text: (Tokenizer, Option<ChatTemplate>),
        config: ServerConfig,
        engine: (EngineConfig, usize),
        wrap: impl FnOnce(Box<dyn StepRunner>) -> Box<dyn StepRunner>,
    ) -> Self {
        let loaded = load(model, text, engine, wrap);
        let handle = handle_of(&loaded);
        let once = Mutex::new(Some(loaded));
        let loader = move |_: &str| {
            let taken = once.lock().unwrap().take();
            taken.ok_or_else(|| "it was loaded before".to_owned())
        };
        let mut running = Self::models(&["demo"], Arc::new(loader), 1, config);
        running.engine = Some(handle);
        running
    }

    /// Serves models, of which the first `preload` are loaded before it begins.
    fn models(
        names: &[&str],
        loader: Arc<dyn ModelLoader>,
        preload: usize,
        config: ServerConfig,
    ) -> Self {
        Self::adapted(names, loader, preload, &[], config)
    }

    /// With adapters from the start.
    fn adapted(
        names: &[&str],
        loader: Arc<dyn ModelLoader>,
        preload: usize,
        adapters: &[(&str, PathBuf)],
        config: ServerConfig,
    ) -> Self {
        let given = adapters
            .iter()
            .map(|(name, dir)| ((*name).to_owned(), dir.clone()));
        let given: Vec<_> = given.collect();
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let (stop, stopped) = oneshot::channel();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                let server = Server::new(names.clone(), loader, config);
                for name in &names[..preload] {
                    server.load(name).await.unwrap();
                }
                for (name, dir) in &given {
                    server.load_adapter(name, dir).await.unwrap();
                }
                server
                    .serve(listener, async { stopped.await.unwrap_or(()) })
                    .await
            })
        });
        Self {
            address: told.recv().unwrap(),
            engine: None,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// With all settings as they come.
    fn demo() -> Self {
        Self::start(ServerConfig::default(), EngineConfig::default(), 4)
    }

    /// The demo model under another chat template.
    fn with_template(source: &str) -> Self {
        let template = ChatTemplate::from_source(source, NO_SPECIALS).unwrap();
        let (model, (tokenizer, _)) = demo_model();
        let (config, engine) = (ServerConfig::default(), EngineConfig::default());
        let text = (tokenizer, Some(template));
        Self::with(model, text, config, (engine, 4), |runner| runner)
    }

    /// Asks it to stop.
    fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    fn wait(&mut self) {
        self.outcome().unwrap();
    }

    /// How it ended.
    fn outcome(&mut self) -> Result<(), ShutdownError> {
        self.thread
            .take()
            .map_or(Ok(()), |thread| thread.join().unwrap())
    }

    /// Sends a request, and reads the head of its answer.
    fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
        if !body.is_empty() {
            head += &format!("Content-Length: {}\r\n", body.len());
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        let mut message = (head + "\r\n").into_bytes();
        message.extend_from_slice(body);
        stream.write_all(&message).unwrap();
        Reply {
            asked: Some((method.to_owned(), path.to_owned())),
            ..Reply::read(stream)
        }
    }

    /// With these settings.
    fn configured(config: ServerConfig) -> Self {
        Self::start(config, EngineConfig::default(), 2)
    }

    fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], b"")
    }

    fn post(&self, path: &str, body: &Value) -> Reply {
        let json = [("Content-Type", "application/json")];
        self.send("POST", path, &json, body.to_string().as_bytes())
    }

    /// The body of an answer that is expected to be fine.
    fn ask(&self, path: &str, body: &Value) -> Value {
        let reply = self.post(path, body);
        let status = reply.status;
        let answer = reply.json();
        assert_eq!(status, 200, "{body}: {answer}");
        answer
    }

    /// The chunks of a streamed answer, whose end is checked.
    fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut events = self.written_events(path, body);
        assert_eq!(events.pop().unwrap(), "data: [DONE]");
        let chunk = |event: &String| {
            let data = event.strip_prefix("data: ").unwrap();
            serde_json::from_str(data).unwrap()
        };
        events.iter().map(chunk).collect()
    }

    /// The events of a streamed answer whose events have names: each has that of its type.
    fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let read = |event: String| {
            let (name, data) = event.split_once('\n').unwrap();
            let data = data.strip_prefix("data: ").unwrap();
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(
                Some(name),
                data["type"]
                    .as_str()
                    .map(|kind| format!("event: {kind}"))
                    .as_deref()
            );
            data
        };
        self.written_events(path, body)
            .into_iter()
            .map(read)
            .collect()
    }

    /// The events of a streamed answer as text; their data is checked against the OpenAPI document.
    fn written_events(&self, path: &str, body: &Value) -> Vec<String> {
        let reply = self.post(path, body);
        let head = reply.head.to_lowercase();
        let (status, text) = (reply.status, reply.text());
        assert_eq!(status, 200, "{body}: {text}");
        assert!(head.contains("content-type: text/event-stream"));
        let events = text.strip_suffix("\n\n").unwrap().split("\n\n");
        for data in events
            .clone()
            .filter_map(|event| event.split_once("data: {"))
        {
            let data = serde_json::from_str(&format!("{{{}", data.1)).unwrap();
            documented::check("POST", path, 200, EVENTS, &data);
        }
        events.map(str::to_owned).collect()
    }

    /// Waits until `done` says so.
    fn until(&self, mut done: impl FnMut(&ferrum_engine::engine::EngineStats) -> bool) {
        let started = std::time::Instant::now();
        loop {
            let stats = self.engine.as_ref().unwrap().stats();
            if done(&stats) {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "{stats:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        if let Some(engine) = &self.engine {
            engine.drain();
        }
        if !std::thread::panicking() {
            self.wait();
        }
    }
}

/// An answer whose body has not been read.
struct Reply {
    /// Method and path.
    asked: Option<(String, String)>,
    status: u16,
    head: String,
    body: BufReader<TcpStream>,
}

impl Reply {
    fn read(stream: TcpStream) -> Self {
        let mut body = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert_ne!(
                body.read_line(&mut head).unwrap(),
                0,
                "the connection ended: {head}"
            );
        }
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self {
            asked: None,
            status,
            head,
            body,
        }
    }

    /// A header of the answer.
    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        let found = lines.find(|(found, _)| found.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value)
    }

    /// A chunk of a chunked body; `None` after the last.
    fn chunk(&mut self) -> Option<String> {
        let mut line = String::new();
        self.body.read_line(&mut line).unwrap();
        let length = usize::from_str_radix(line.trim(), 16).unwrap();
        let mut bytes = vec![0; length + 2];
        self.body.read_exact(&mut bytes).unwrap();
        bytes.truncate(length);
        (length > 0).then(|| String::from_utf8(bytes).unwrap())
    }

    fn text(mut self) -> String {
        let mut text = String::new();
        if self
            .head
            .to_lowercase()
            .contains("transfer-encoding: chunked")
        {
            while let Some(chunk) = self.chunk() {
                text += &chunk;
            }
        } else {
            self.body.read_to_string(&mut text).unwrap();
        }
        text
    }

    /// Its body, checked against the OpenAPI document.
    fn json(mut self) -> Value {
        let (asked, status) = (self.asked.take(), self.status);
        let text = self.text();
        let answer = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        if let Some((method, path)) = asked {
            documented::check(&method, &path, status, "application/json", &answer);
        }
        answer
    }
}
