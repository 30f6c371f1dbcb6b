//! Clients that do not send, do not read or come in crowds.

use super::{CONTEXT, PATIENCE, Running};
use ferrum_engine::EngineConfig;
use ferrum_server::ServerConfig;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

const TEXT: &str = "/v1/completions";

const SHORT: Duration = Duration::from_millis(300);

fn connect(server: &Running) -> TcpStream {
    let stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A connection whose own end holds little, so that what is not read soon fills the other.
fn narrow(server: &Running) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let stream = socket.connect(server.address).await.unwrap();
        let stream = stream.into_std().unwrap();
        stream.set_nonblocking(false).unwrap();
        stream
    })
}

/// Asks again and again until the status is this.
fn until_status(status: u16, ask: impl Fn() -> u16) {
    let began = Instant::now();
    while ask() != status {
        assert!(began.elapsed() < PATIENCE, "never {status}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_client_that_reads_nothing_loses_its_connection() {
    let server = Running::configured(ServerConfig {
        max_connections: 1,
        write_timeout: SHORT,
        ..ServerConfig::default()
    });
    let mut rude = connect(&server);
    // More than the buffers of both sides hold.
    let pages = "GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(200);
    rude.write_all(pages.as_bytes()).unwrap();
    let began = Instant::now();
    while rude.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").is_ok() {
        assert!(began.elapsed() < PATIENCE, "it keeps its connection");
        std::thread::sleep(Duration::from_millis(20));
    }
    until_status(200, || server.get("/v1/models").status);
}

/// Whoever is refused while it still sends can send all, and reads the answer.
#[test]
fn a_refusal_before_the_end_of_a_body_reaches_the_client() {
    let server = Running::configured(ServerConfig {
        max_body_bytes: 1000,
        api_keys: vec!["secret".into()],
        ..ServerConfig::default()
    });
    // More than the buffers of both sides hold.
    let rest = vec![b'a'; 32 << 20];
    let length = format!("Content-Length: {}\r\n", rest.len());
    let key = "Authorization: Bearer secret\r\n";
    for (path, key, framing, status) in [
        (TEXT, key, length.as_str(), "413"),
        (TEXT, "", &length, "401"),
        ("/v1/nothing", key, &length, "404"),
        (TEXT, "", "Transfer-Encoding: chunked\r\n", "401"),
    ] {
        let mut stream = connect(&server);
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\n{key}Content-Type: application/json\r\n{framing}\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        if framing == length {
            stream.write_all(&rest[..2000]).unwrap();
        }
        // The answer is there, and the rest is not yet sent.
        assert_ne!(stream.peek(&mut [0]).unwrap(), 0);
        let chunk = format!("{:x}\r\n", rest.len());
        match framing == length {
            true => stream.write_all(&rest[2000..]).unwrap(),
            false => {
                stream.write_all(chunk.as_bytes()).unwrap();
                stream.write_all(&rest).unwrap();
                stream.write_all(b"\r\n0\r\n\r\n").unwrap();
            }
        }
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer.split(' ').nth(1), Some(status), "{path} {framing}");
        assert!(answer.ends_with('}'), "{answer}");
    }
}

#[test]
fn a_stream_that_nobody_reads_is_cancelled() {
    let server = Running::configured(ServerConfig {
        write_timeout: SHORT,
        ..ServerConfig::default()
    });
    // Each chunk is long, so that the buffers are full before the answers end.
    let body =
        json!({"prompt": "Once upon a time", "max_tokens": CONTEXT, "n": 128, "ignore_eos": true,
                      "logprobs": 20, "stream": true})
        .to_string();
    let mut rude = narrow(&server);
    let head = format!(
        "POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    rude.write_all((head + &body).as_bytes()).unwrap();
    server.until(|stats| stats.running > 0);
    server.until(|stats| stats.running + stats.waiting + stats.preempted == 0);
    let stats = server.engine.as_ref().unwrap().stats();
    let all = 128 * (CONTEXT as u64 - 20);
    assert!(stats.generated_tokens < all, "{stats:?}");
    drop(rude);
}

#[test]
fn silence_ends_a_connection_unless_a_request_is_open() {
    // Longer than a busy machine keeps a client waiting.
    let silence = Duration::from_secs(2);
    let server = Running::configured(ServerConfig {
        idle_timeout: silence,
        read_timeout: silence,
        ..ServerConfig::default()
    });
    // Nothing, a part of a head, and nothing after a whole request.
    for (said, status) in [
        ("", ""),
        ("GET /health HT", ""),
        ("GET /health HTTP/1.1\r\nHost: x\r\n\r\n", "200"),
    ] {
        let mut stream = connect(&server);
        stream.write_all(said.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer);
        assert_eq!(answer.split(' ').nth(1).unwrap_or(""), status, "{said}");
    }
    // An answer that takes longer than any silence may.
    let mut body =
        json!({"prompt": "Once upon a time", "max_tokens": 400, "n": 8, "ignore_eos": true});
    let answer = server.ask(TEXT, &body);
    assert_eq!(answer["choices"].as_array().unwrap().len(), 8);
    body["stream"] = true.into();
    let chunks = server.stream(TEXT, &body);
    let ended = |chunk: &&Value| chunk["choices"][0]["finish_reason"] == "length";
    assert_eq!(chunks.iter().filter(ended).count(), 8);
    // Requests one after another are none either.
    let mut stream = connect(&server);
    let began = Instant::now();
    while began.elapsed() < 2 * silence {
        stream
            .write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200");
        let mut rest = Vec::new();
        while !rest.ends_with(b"}") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            rest.push(byte[0]);
        }
    }
}

#[test]
fn a_full_server_tells_its_health_and_refuses_the_rest() {
    let server = Running::configured(ServerConfig {
        max_connections: 2,
        ..ServerConfig::default()
    });
    let held: Vec<_> = (0..2).map(|_| connect(&server)).collect();
    until_status(503, || server.get("/v1/models").status);
    let crowd: Vec<_> = (0..200).map(|_| connect(&server)).collect();
    for path in ["/health", "/ready"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    for path in ["/", "/v1/models", "/nowhere", "/metrics"] {
        let reply = server.get(path);
        assert_eq!(reply.status, 503, "{path}");
        assert_eq!(reply.header("retry-after"), Some("1"), "{path}");
        assert_eq!(reply.header("connection"), Some("close"), "{path}");
        assert_eq!(reply.json()["error"]["code"], "overloaded", "{path}");
    }
    let body = json!({"prompt": "a"});
    assert_eq!(server.post(TEXT, &body).status, 503);
    drop((held, crowd));
    until_status(200, || server.get("/v1/models").status);
}

#[test]
fn bodies_wait_for_memory_and_are_refused_without() {
    let server = Running::start(
        ServerConfig {
            max_body_bytes: 1 << 20,
            max_bodies_bytes: 1 << 20,
            read_timeout: PATIENCE,
            ..ServerConfig::default()
        },
        EngineConfig::default(),
        2,
    );
    let json_type = [("Content-Type", "application/json")];
    let long = vec![b' '; 512 << 10];
    let ask = || server.send("POST", TEXT, &json_type, &long);
    // There is no JSON in it.
    assert_eq!(ask().status, 400);
    let announced = || {
        let mut holder = connect(&server);
        let head = format!(
            "POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            1 << 20
        );
        holder.write_all(head.as_bytes()).unwrap();
        holder
    };
    let mut holder = announced();
    // Who only announces a body takes nothing.
    assert_eq!(ask().status, 400);
    let began = Instant::now();
    loop {
        holder.write_all(&vec![b' '; (1 << 20) - 1]).unwrap();
        if (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(20));
            ask().status == 503
        }) {
            break;
        }
        // Bodies that came at the same moment had what it waited for, until it was the one to be refused: another takes its place.
        assert!(began.elapsed() < PATIENCE, "never 503");
        holder = announced();
    }
    let refused = ask();
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(refused.json()["error"]["code"], "overloaded");
    // Short bodies are not kept waiting.
    server.ask(TEXT, &json!({"prompt": "a", "max_tokens": 1}));
    drop(holder);
    until_status(400, || ask().status);
}
