//! `ferrum serve` as a process of its own, for the tests that need one.
#![allow(dead_code, reason = "each test uses a part of it")]

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};

/// A server that answers and does not outlive its test.
pub(crate) struct Serving {
    process: Child,
    words: Option<BufReader<ChildStderr>>,
    /// Host and port.
    pub(crate) address: String,
    /// What it said until it could be asked.
    pub(crate) said: String,
}

impl Serving {
    /// The demo model on a free port, with further flags.
    pub(crate) fn start(flags: &[&str]) -> Self {
        Self::of(serve(&["--port", "0", "--backend", "cpu"]).args(flags))
    }

    pub(crate) fn of(command: &mut Command) -> Self {
        let process = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut serving = Self {
            process,
            words: None,
            address: String::new(),
            said: String::new(),
        };
        let mut words = BufReader::new(serving.process.stderr.take().unwrap());
        loop {
            let mut line = String::new();
            let length = words.read_line(&mut line).unwrap();
            assert_ne!(length, 0, "it ended: {}", serving.said);
            serving.said += &line;
            if let Some(url) = line.trim().strip_prefix("API base") {
                serving.address = address(url);
            }
            if let Ok(event) = serde_json::from_str::<Value>(&line)
                && let Some(url) = event["api_base"].as_str()
            {
                serving.address = address(url);
                break;
            }
            // The last line of what it says at the start.
            if line.trim().starts_with("log level") {
                break;
            }
        }
        serving.words = Some(words);
        serving
    }

    /// What clients of OpenAI's routes are given.
    pub(crate) fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// Drops whatever else it says, so that it need not wait for a reader.
    pub(crate) fn unheard(mut self) -> Self {
        if let Some(mut words) = self.words.take() {
            std::thread::spawn(move || std::io::copy(&mut words, &mut std::io::sink()));
        }
        self
    }

    /// A connection on which a request was sent.
    pub(crate) fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        let rest =
            format!("Host: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}");
        stream
            .write_all(format!("{head}\r\n{rest}").as_bytes())
            .unwrap();
        stream
    }

    /// The whole answer to a request.
    pub(crate) fn ask(&self, head: &str, body: &str) -> String {
        let mut answer = String::new();
        self.send(head, body).read_to_string(&mut answer).unwrap();
        answer
    }

    /// The value of the first metric whose line begins so.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let page = self.ask("GET /metrics HTTP/1.1", "");
        let line = page.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Sends the process a signal, such as `-HUP`.
    #[cfg(unix)]
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        let sent = Command::new("kill").args([name, &pid]).status();
        assert!(sent.unwrap().success());
    }

    /// Asks it to end, and gives what else it said.
    #[cfg(unix)]
    pub(crate) fn end(mut self) -> String {
        self.signal("-TERM");
        assert!(self.process.wait().unwrap().success());
        self.rest()
    }

    /// The same where it cannot end well.
    #[cfg(unix)]
    pub(crate) fn end_badly(mut self) -> String {
        self.signal("-TERM");
        assert_eq!(self.process.wait().unwrap().code(), Some(1));
        self.rest()
    }

    #[cfg(unix)]
    fn rest(&mut self) -> String {
        let mut rest = String::new();
        if let Some(words) = &mut self.words {
            words.read_to_string(&mut rest).unwrap();
        }
        rest
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// `ferrum serve` with arguments.
pub(crate) fn serve(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrum"));
    command.arg("serve").args(args);
    command
}

fn address(url: &str) -> String {
    let rest = url.trim().strip_prefix("http://").unwrap();
    rest.strip_suffix("/v1").unwrap().to_owned()
}
