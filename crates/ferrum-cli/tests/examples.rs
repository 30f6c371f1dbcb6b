//! The programs of `examples/`, run as a reader of the docs would run them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_test_support::skip;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

#[path = "../../../examples/rust/generate.rs"]
mod generate;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// `ferrum serve` with the demo model; ends with its test.
struct Serving {
    process: Child,
    address: String,
    log: NamedTempFile,
}

impl Serving {
    fn start() -> Self {
        // Free a moment ago: if another process takes it in between, the server ends and the test fails.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
        let address = address.unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrum"));
        command.args(["serve", "--backend", "cpu", "--port"]);
        command.arg(address.port().to_string());
        let log = NamedTempFile::new().unwrap();
        let process = command.stderr(log.reopen().unwrap()).spawn().unwrap();
        let mut serving = Self {
            process,
            address: address.to_string(),
            log,
        };
        serving.wait();
        serving
    }

    /// Waits until requests are taken.
    fn wait(&mut self) {
        let begin = Instant::now();
        while !self.is_ready() {
            if let Some(status) = self.process.try_wait().unwrap() {
                let log = std::fs::read_to_string(self.log.path()).unwrap();
                panic!("the server ended with {status}: {log}");
            }
            assert!(begin.elapsed() < Duration::from_secs(120), "not ready");
            sleep(Duration::from_millis(20));
        }
    }

    fn is_ready(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(&self.address) else {
            return false;
        };
        let request = "GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let mut answer = String::new();
        stream.write_all(request.as_bytes()).is_ok()
            && stream.read_to_string(&mut answer).is_ok()
            && answer.starts_with("HTTP/1.1 200 ")
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Whether a command runs and ends well.
fn works(program: &str, args: &[&str], dir: &Path) -> bool {
    let mut command = Command::new(program);
    command.args(args).current_dir(dir);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Runs an example against the server, and gives what it printed.
fn run(serving: &Serving, program: &str, example: &str) -> String {
    let path = root().join("examples").join(example);
    let output = Command::new(program)
        .arg(path)
        .env("OPENAI_BASE_URL", format!("http://{}/v1", serving.address))
        .env("OPENAI_API_KEY", "none")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{example}: {text}{words}");
    text
}

#[test]
#[cfg(unix)]
fn examples_with_curl() {
    if !works("curl", &["--version"], &root()) {
        skip("curl is not installed");
        return;
    }
    let serving = Serving::start();
    let chat = run(&serving, "sh", "curl/chat.sh");
    let (whole, stream) = chat.split_once('\n').unwrap();
    let whole: serde_json::Value = serde_json::from_str(whole).unwrap();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    let events: Vec<_> = stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .collect();
    let (last, pieces) = events.split_last().unwrap();
    assert_eq!(*last, "[DONE]");
    let streamed: String = pieces
        .iter()
        .map(|piece| serde_json::from_str::<serde_json::Value>(piece).unwrap())
        .filter_map(|piece| Some(piece["choices"][0]["delta"]["content"].as_str()?.to_owned()))
        .collect();
    assert_eq!(streamed, text);
    assert!(text.contains("12"), "{text}");

    let structured = run(&serving, "sh", "curl/structured.sh");
    let whole: serde_json::Value = serde_json::from_str(&structured).unwrap();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    let value: serde_json::Value = serde_json::from_str(text).unwrap();
    assert!(value["result"].is_u64(), "{text}");
}

#[test]
fn examples_in_python() {
    let python = if cfg!(windows) { "python" } else { "python3" };
    if !works(python, &["-c", "import openai"], &root()) {
        skip(format_args!(
            "{python} with the package `openai` is not installed"
        ));
        return;
    }
    let serving = Serving::start();
    let chat = run(&serving, python, "python/chat.py");
    assert!(chat.lines().next().unwrap().contains("12"), "{chat}");
    assert!(chat.lines().count() > 2, "{chat}");
    let tools = run(&serving, python, "python/tools.py");
    assert!(
        tools.starts_with("get_weather({'city': 'Paris'})\n"),
        "{tools}"
    );
    assert!(tools.lines().count() > 1, "{tools}");
    let structured = run(&serving, python, "python/structured.py");
    let lines: Vec<_> = structured.lines().collect();
    let [sum, choice] = lines[..] else {
        panic!("{structured}")
    };
    assert!(sum.starts_with("{'result': "), "{structured}");
    assert!(choice.starts_with("The sky is "), "{structured}");
}

#[test]
fn examples_in_javascript() {
    let dir = root().join("examples/javascript");
    if !works("node", &["-e", "import('openai')"], &dir) {
        skip("node with the package `openai` is not installed");
        return;
    }
    let serving = Serving::start();
    let chat = run(&serving, "node", "javascript/chat.mjs");
    assert!(chat.lines().next().unwrap().contains("12"), "{chat}");
    assert!(chat.lines().count() > 1, "{chat}");
}

#[test]
fn example_in_rust() {
    let model = root().join("assets/demo/ferrum-demo.gguf");
    let mut text = Vec::new();
    let tokens = generate::answer(&model, "What is 7 plus 5?", &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(tokens > 0 && text.contains("12"), "{text}");
}
