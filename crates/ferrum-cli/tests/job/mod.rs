//! Servers of several processes, which a prepared `mpirun` starts, and how they end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) const FERRUM: &str = env!("CARGO_BIN_EXE_ferrum");

/// A job that does not outlive its test.
pub(crate) struct Job(pub(crate) Child);

impl Drop for Job {
    fn drop(&mut self) {
        // Mostly it has ended; what it started ends with it.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The numbers of the processes that a process has started, and of those that they have.
pub(crate) fn descendants(of: u32) -> Vec<u32> {
    // Any of its threads may have started one.
    let threads = std::fs::read_dir(format!("/proc/{of}/task"))
        .into_iter()
        .flatten();
    let children = threads
        .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("children")).ok());
    let children = children.collect::<Vec<_>>().concat();
    let own = children.split_whitespace().map(|pid| pid.parse().unwrap());
    own.flat_map(|pid| [vec![pid], descendants(pid)].concat())
        .collect()
}

/// A server of two ranks by a prepared `mpirun`, of a model or of the demo model: the job, its address, and what it says on
/// stderr from then on.
pub(crate) fn serve(
    mut command: Command,
    backend: &str,
    model: Option<&str>,
) -> (Job, String, std::thread::JoinHandle<String>) {
    command.args([FERRUM, "serve", "--port", "0"]);
    command.args(["--backend", backend, "--tensor-parallel", "2"]);
    command.args(["--threads", "1"]);
    command.args(model);
    let child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn();
    let mut job = Job(child.unwrap());
    let mut said = BufReader::new(job.0.stderr.take().unwrap());
    let (mut address, mut before) = (String::new(), String::new());
    loop {
        let mut line = String::new();
        let length = said.read_line(&mut line).unwrap();
        assert_ne!(length, 0, "it ended: {before}");
        before += &line;
        if let Some((_, url)) = line.split_once("API base") {
            let host = url.trim().trim_start_matches("http://");
            address = host.trim_end_matches("/v1").to_owned();
        }
        if line.trim().starts_with("log level") {
            break;
        }
    }
    let rest = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = said.read_to_string(&mut text);
        text
    });
    (job, address, rest)
}

/// The answer to a request; empty if the server is gone.
fn ask(address: &str, head: &str, body: &str) -> String {
    let mut answer = Vec::new();
    if let Ok(mut stream) = TcpStream::connect(address) {
        let length = body.len();
        let rest = format!("Host: x\r\nConnection: close\r\nContent-Length: {length}");
        let request = format!("{head} HTTP/1.1\r\n{rest}\r\n\r\n{body}");
        let _ = stream.write_all(request.as_bytes());
        let _ = stream.read_to_end(&mut answer);
    }
    String::from_utf8_lossy(&answer).into_owned()
}

pub(crate) fn complete(address: &str) -> String {
    complete_with(
        address,
        r#"{"prompt": [5, 9, 2, 77], "max_tokens": 8, "temperature": 0, "logprobs": 5}"#,
    )
}

pub(crate) fn complete_with(address: &str, body: &str) -> String {
    let Ok(mut stream) = TcpStream::connect(address) else {
        return String::new();
    };
    let rest = format!(
        "Host: x\r\nConnection: close\r\nContent-Length: {}",
        body.len()
    );
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n{rest}\r\n\r\n{body}"
    );
    let _ = stream.write_all(request.as_bytes());
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

/// Waits until a job has ended, and says how long that took and whether health was red before.
pub(crate) fn await_end(job: &mut Job, address: &str) -> (Duration, bool) {
    let (start, mut red) = (Instant::now(), false);
    while job.0.try_wait().unwrap().is_none() {
        let waited = start.elapsed();
        assert!(waited < Duration::from_secs(60), "it did not end");
        red |= ask(address, "GET /health", "").starts_with("HTTP/1.1 503");
        std::thread::sleep(Duration::from_millis(20));
    }
    (start.elapsed(), red)
}

/// Kills rank 1 of a server; what the job says, whether health was red and whether `mpirun` failed.
pub(crate) fn kill_a_rank(command: Command, backend: &str) -> (String, String, bool, bool) {
    let (mut job, address, rest) = serve(command, backend, None);
    let answer = complete(&address);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let mut ranks = descendants(job.0.id());
    ranks.retain(|pid| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mut variables = environment.split(|&byte| byte == 0);
        variables.any(|variable| variable == b"OMPI_COMM_WORLD_RANK=1")
    });
    assert_eq!(ranks.len(), 1, "{ranks:?}");
    // Somebody is being answered; of an idle server, the next step would tell.
    let busy = address.clone();
    let asking = std::thread::spawn(move || while !complete(&busy).is_empty() {});
    let pid = ranks[0].to_string();
    let killed = Command::new("kill").args(["-9", &pid]).status();
    assert!(killed.unwrap().success());
    let (took, red) = await_end(&mut job, &address);
    println!("ended after {took:.1?}");
    asking.join().unwrap();
    let failed = !job.0.wait().unwrap().success();
    let sentence = format!("rank 1 of 2 ended the group: process {pid} on ");
    (rest.join().unwrap(), sentence, red, failed)
}
