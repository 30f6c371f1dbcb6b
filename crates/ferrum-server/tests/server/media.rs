//! Images that requests name by a URL: fetched from hosts that are listed, and from nowhere else.

use super::vision::{CHAT, MESSAGES, RESPONSES, ask, check_chats, configured, file};
use super::*;
use serde_json::json;
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Most bytes of a request and of its images.
const MAX_BYTES: usize = 64 << 10;

/// A server of images. Its threads end with the test program.
struct ImageServer {
    address: SocketAddr,
    /// The paths that were asked for.
    seen: Arc<Mutex<Vec<String>>>,
    /// Says that a client left while it waited.
    left: Receiver<()>,
}

impl ImageServer {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (tell, left) = channel();
        let paths = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (paths, tell) = (Arc::clone(&paths), tell.clone());
                // A client that goes away is no failure of the server.
                std::thread::spawn(move || serve(stream, &paths, &tell));
            }
        });
        Self {
            address,
            seen,
            left,
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.address)
    }

    /// The number of requests since the last time.
    fn asked(&self) -> usize {
        std::mem::take(&mut *self.seen.lock().unwrap()).len()
    }
}

fn serve(
    mut stream: TcpStream,
    seen: &Mutex<Vec<String>>,
    left: &Sender<()>,
) -> std::io::Result<()> {
    let mut head = String::new();
    let mut lines = BufReader::new(stream.try_clone()?);
    while !head.ends_with("\r\n\r\n") {
        if lines.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let path = head.split([' ', '?']).nth(1).unwrap_or_default();
    let path = path.trim_start_matches('/').to_owned();
    seen.lock().unwrap().push(path.clone());
    let whole = |kind: &str, body: &[u8]| {
        let length = body.len();
        let head = format!("200 OK\r\nContent-Type: {kind}\r\nContent-Length: {length}");
        (head, body.to_vec())
    };
    let (head, body) = match path.as_str() {
        "slow" => ("200 OK\r\nContent-Length: 9".into(), b"slow".to_vec()),
        "cut" => ("200 OK\r\nContent-Length: 9".into(), b"cut".to_vec()),
        "text" => whole("text/html", b"<p>no image at all</p>"),
        "large" => whole("image/png", &[0; MAX_BYTES + 1]),
        "half" => whole("image/png", &[0; MAX_BYTES / 2 + 1]),
        // Its body ends with the connection.
        "endless" => ("200 OK".into(), vec![0; 4 * MAX_BYTES]),
        "redirect" => (
            "302 Found\r\nLocation: /photo.png\r\nContent-Length: 0".into(),
            Vec::new(),
        ),
        "missing" => ("404 Not Found\r\nContent-Length: 0".into(), Vec::new()),
        name => whole("image/png", &file(name)),
    };
    stream.write_all(format!("HTTP/1.1 {head}\r\n\r\n").as_bytes())?;
    stream.write_all(&body)?;
    if path == "slow" {
        let end = lines.read(&mut [0]);
        let _ = left.send(());
        end?;
    }
    Ok(())
}

/// A server that fetches from these hosts.
fn fetching(domains: &[String]) -> Running {
    limited(domains, PATIENCE)
}

fn limited(domains: &[String], media_timeout: Duration) -> Running {
    configured(ServerConfig {
        allowed_media_domains: domains.iter().map(|text| text.parse().unwrap()).collect(),
        media_timeout,
        max_body_bytes: MAX_BYTES,
        ..ServerConfig::default()
    })
}

#[test]
fn images_of_listed_hosts_are_as_good_as_those_of_requests() {
    let images = ImageServer::start();
    let port = images.address.port();
    let server = fetching(&[format!("127.0.0.1:{port}"), format!("LocalHost:{port}")]);
    check_chats(
        &server,
        |name| images.url(name),
        |name| json!({"type": "url", "url": images.url(name)}),
    );
    assert!(images.asked() > 0);
    let by_name = format!("http://LOCALHOST:{port}/photo.png?sig=a#b");
    let answer = ask(&server, "sees", &[&by_name], "What is this?").json();
    let by_address = ask(
        &server,
        "sees",
        &[&images.url("photo.png")],
        "What is this?",
    )
    .json();
    assert_eq!(answer["choices"], by_address["choices"], "{answer}");
    assert_eq!(answer["usage"], by_address["usage"]);
}

/// The error of a request with one image, which harms no other request.
fn refused(server: &Running, url: &str) -> String {
    let reply = ask(server, "sees", &[url], "What is this?");
    assert_eq!(reply.status, 400, "{url}");
    let error = reply.json()["error"].take();
    assert_eq!(error["param"], "messages[0].content[0]", "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(!message.contains("secret"), "{message}");
    message.to_owned()
}

#[test]
fn what_cannot_be_fetched_is_an_error_of_its_request() {
    let images = ImageServer::start();
    let port = images.address.port();
    let server = fetching(&[
        format!("127.0.0.1:{port}"),
        format!("*:{port}"),
        "images.example".into(),
    ]);
    for (url, words, asked) in [
        (
            "http://127.0.0.1:PORT/redirect?secret",
            "127.0.0.1 answers with a redirect (302)",
            1,
        ),
        (
            "http://127.0.0.1:PORT/missing?secret",
            "127.0.0.1 answers with 404; expected",
            1,
        ),
        (
            "http://127.0.0.1:PORT/large?secret",
            "sends 65537 bytes; expected at most 65536",
            1,
        ),
        (
            "http://127.0.0.1:PORT/endless?secret",
            "sends too many bytes; expected at most 65536",
            1,
        ),
        (
            "http://127.0.0.1:PORT/text?secret",
            "not an image that is supported",
            1,
        ),
        (
            "http://127.0.0.1:PORT/cut?secret",
            "127.0.0.1 did not send the whole image: ",
            1,
        ),
        (
            "https://127.0.0.1:PORT/photo.png?secret",
            "127.0.0.1 cannot be reached: ",
            0,
        ),
        (
            "http://other.example/photo.png?secret",
            "from \"other.example\" at port 80",
            0,
        ),
        (
            "http://images.example:81/secret",
            "from \"images.example\" at port 81",
            0,
        ),
        (
            "http://secret@127.0.0.1:PORT/photo.png",
            "user names do not belong in it",
            0,
        ),
        ("http:///photo.png?secret", "the URL is not usable", 0),
        (
            "ftp://127.0.0.1:PORT/photo.png?secret",
            "expected a data URL",
            0,
        ),
        // Hosts that only a wildcard allows.
        (
            "http://localhost:PORT/photo.png?secret",
            "localhost has no public address",
            0,
        ),
        (
            "http://[::ffff:127.0.0.1]:PORT/photo.png?secret",
            "has no public address",
            0,
        ),
        (
            "http://10.0.0.1:PORT/photo.png?secret",
            "10.0.0.1 has no public address",
            0,
        ),
    ] {
        let url = url.replace("PORT", &port.to_string());
        let message = refused(&server, &url);
        assert!(message.contains(words), "{url}: {message}");
        assert_eq!(images.asked(), asked, "{url}");
    }
    let good = images.url("photo.png");
    assert_eq!(ask(&server, "sees", &[&good], "What is this?").status, 200);
}

#[test]
fn images_are_fetched_within_a_time() {
    let images = ImageServer::start();
    let limit = Duration::from_millis(300);
    let server = limited(&[images.address.to_string()], limit);
    let message = refused(&server, &images.url("slow?secret"));
    let words = "127.0.0.1 did not send the image within 300ms";
    assert!(message.contains(words), "{message}");
    images.left.recv_timeout(PATIENCE).unwrap();
}

#[test]
fn without_listed_hosts_nothing_is_fetched() {
    let images = ImageServer::start();
    let server = configured(ServerConfig::default());
    let message = refused(&server, &images.url("photo.png?secret"));
    assert!(message.contains("--allowed-media-domains"), "{message}");
    assert_eq!(images.asked(), 0);
}

#[test]
fn nothing_is_fetched_for_requests_that_are_refused() {
    let images = ImageServer::start();
    let server = fetching(&[images.address.to_string()]);
    let good = images.url("photo.png");
    let many = vec![&*good; 17];
    for (model, urls, param) in [
        ("demo", &[&*good][..], "messages[0].content[0].type"),
        ("sees", &many, "messages[0].content[16]"),
        (
            "sees",
            &[&good, "http://other.example/"],
            "messages[0].content[1]",
        ),
    ] {
        let reply = ask(&server, model, urls, "a");
        assert_eq!(reply.status, 400);
        assert_eq!(reply.json()["error"]["param"], param);
    }
    let image = json!({"type": "image_url", "image_url": good});
    let messages = json!([{"role": "user", "content": [image]}]);
    let body = json!({"model": "sees", "messages": messages});
    assert_eq!(server.post("/tokenize", &body).status, 400);
    assert_eq!(images.asked(), 0);
    // Many are fine, if they are small together.
    assert_eq!(ask(&server, "sees", &many[..3], "a").status, 200);
    assert_eq!(images.asked(), 3);
    let half = images.url("half");
    let reply = ask(&server, "sees", &[&half, &half], "a");
    assert_eq!(reply.status, 400);
    let error = reply.json();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("of all images of the request"),
        "{message}"
    );
}

#[test]
fn errors_have_the_shape_of_their_api() {
    let images = ImageServer::start();
    let server = fetching(&[images.address.to_string()]);
    let url = images.url("missing");
    let content = json!([{"type": "input_image", "image_url": url}]);
    let body = json!({"model": "sees", "input": [{"role": "user", "content": content}]});
    for path in [RESPONSES, "/v1/responses/input_tokens"] {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400);
        let error = reply.json()["error"].take();
        assert_eq!(error["param"], "input[0].content[0]", "{error}");
        assert_eq!(error["code"], "invalid_image_url", "{error}");
    }
    let content = json!([{"type": "image", "source": {"type": "url", "url": url}}]);
    let body = json!({"model": "sees", "max_tokens": 1, "messages": [{"role": "user", "content": content}]});
    for path in [MESSAGES, "/v1/messages/count_tokens"] {
        let mut body = body.clone();
        if path != MESSAGES {
            body["max_tokens"] = Value::Null;
        }
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400);
        let answer = reply.json();
        assert_eq!(answer["type"], "error", "{answer}");
        assert_eq!(answer["error"]["type"], "invalid_request_error", "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        let words = "messages[0].content[0]: 127.0.0.1 answers with 404";
        assert!(message.starts_with(words), "{message}");
    }
}

/// A response that goes on from another needs no host any more.
#[test]
fn kept_conversations_keep_what_was_fetched() {
    let images = ImageServer::start();
    let server = fetching(&[images.address.to_string()]);
    let content = json!([{"type": "input_image", "image_url": images.url("photo.png")}]);
    let mut body = json!({"model": "sees", "temperature": 0, "max_output_tokens": 5, "store": true,
        "instructions": "Be brief.", "input": [{"role": "user", "content": content}]});
    let answer = server.ask(RESPONSES, &body);
    assert_eq!(images.asked(), 1);
    let id = answer["id"].as_str().unwrap();
    let items = server
        .get(&format!("/v1/responses/{id}/input_items"))
        .json();
    let kept = &items["data"][0]["content"][0]["image_url"];
    let kept = kept.as_str().unwrap();
    assert!(kept.starts_with("data:image/png;base64,"), "{kept}");
    body["previous_response_id"] = id.into();
    body["input"] = "And?".into();
    server.ask(RESPONSES, &body);
    assert_eq!(images.asked(), 0);
}

#[test]
fn a_client_that_leaves_ends_its_fetches() {
    let images = ImageServer::start();
    let server = fetching(&[images.address.to_string()]);
    let image = json!({"type": "image_url", "image_url": {"url": images.url("slow")}});
    let body = json!({"model": "sees", "messages": [{"role": "user", "content": [image]}]});
    let body = body.to_string();
    let mut client = TcpStream::connect(server.address).unwrap();
    write!(
        client,
        "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let began = std::time::Instant::now();
    while images.seen.lock().unwrap().is_empty() {
        assert!(began.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(client);
    // Long before the time of the fetch is over.
    images.left.recv_timeout(PATIENCE / 2).unwrap();
}
