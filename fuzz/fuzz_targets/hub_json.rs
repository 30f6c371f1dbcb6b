//! What a hub says: whatever it answers, a pull ends, and writes nothing outside of its cache.
#![no_main]

use ferrum_client::http::{Proxy, Timeouts, Url};
use ferrum_client::hub::{Hub, HubConfig, Retries};
use ferrum_formats::hub::{DownloadScope, HubCache, ModelName, Revision};
use libfuzzer_sys::fuzz_target;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;
use tempfile::TempDir;

/// What the hub says of a model, the headers of its files, and the contents of each.
#[derive(Clone, Default)]
struct Answers {
    listing: Vec<u8>,
    headers: Vec<u8>,
    contents: Vec<u8>,
}

static ANSWERS: Mutex<Answers> = Mutex::new(Answers {
    listing: Vec::new(),
    headers: Vec::new(),
    contents: Vec::new(),
});

/// Answers the requests of a connection until the client goes away.
fn serve(stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream.try_clone()?;
    let mut lines = BufReader::new(stream).lines();
    while let Some(line) = lines.next().transpose()? {
        while lines
            .next()
            .transpose()?
            .is_some_and(|line| !line.is_empty())
        {}
        let answers = ANSWERS.lock().expect("no panic while it is held").clone();
        let (headers, body) = match line.contains("/api/models/") {
            true => (&[][..], &answers.listing),
            false => (&answers.headers[..], &answers.contents),
        };
        let length = body.len();
        let mut answer = b"HTTP/1.1 200 OK\r\n".to_vec();
        answer.extend_from_slice(headers);
        answer.extend_from_slice(format!("content-length: {length}\r\n\r\n").as_bytes());
        if !line.starts_with("HEAD") {
            answer.extend_from_slice(body);
        }
        out.write_all(&answer)?;
    }
    Ok(())
}

struct World {
    dir: TempDir,
    hub: Hub,
}

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(|| {
    let dir = tempfile::tempdir().expect("a folder");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that goes away is no failure.
            std::thread::spawn(move || drop(serve(stream)));
        }
    });
    let second = Duration::from_secs(1);
    let config = HubConfig {
        endpoint: Url::parse(&format!("http://{address}")).expect("an address"),
        token: None,
        cache: HubCache::new(dir.path().join("cache")),
        timeouts: Timeouts {
            connect: second,
            response: second,
            read: second,
        },
        retries: Retries {
            attempts: 1,
            pause: Duration::ZERO,
        },
        proxy: Proxy::default(),
    };
    let hub = Hub::new(config).expect("a hub");
    Mutex::new(World { dir, hub })
});

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Takes a piece that ends at a line feed.
fn line<'a>(data: &mut &'a [u8]) -> &'a [u8] {
    let end = data.iter().position(|&b| b == b'\n').unwrap_or(data.len());
    let (head, rest) = data.split_at(end);
    *data = rest.get(1..).unwrap_or(&[]);
    head
}

// The listing in one line, which of its files is asked for, the value of each header, and the contents of all files.
fuzz_target!(|data: &[u8]| {
    let mut data = data;
    let listing = line(&mut data).to_vec();
    let file = String::from_utf8_lossy(line(&mut data)).into_owned();
    let mut headers = Vec::new();
    for name in ["etag", "x-repo-commit", "x-linked-size"] {
        let value = line(&mut data);
        // What is no value of a header would be another answer.
        if !value.is_empty() && value.iter().all(|b| (b' '..=b'~').contains(b)) {
            headers.extend_from_slice(name.as_bytes());
            headers.extend_from_slice(b": ");
            headers.extend_from_slice(value);
            headers.extend_from_slice(b"\r\n");
        }
    }
    let model = match file.is_empty() {
        true => "org/name".to_owned(),
        false => format!("org/name:{file}"),
    };
    let Ok(model) = ModelName::parse(&model) else {
        return;
    };
    let world = WORLD.lock().expect("a panic ends the process");
    *ANSWERS.lock().expect("no panic while it is held") = Answers {
        listing,
        headers,
        contents: data.to_vec(),
    };
    let cache = world.dir.path().join("cache");
    let revision = Revision::parse("main").expect("a revision");
    for want in [DownloadScope::Tokenizer, DownloadScope::Model] {
        if let Ok(pulled) = world.hub.pull(&model, &revision, want, &mut |_| ()) {
            assert!(pulled.path.starts_with(&cache), "{}", pulled.path.display());
            assert!(pulled.path.exists(), "{}", pulled.path.display());
            let inside = pulled.path.canonicalize().expect("it is there");
            let root = cache.canonicalize().expect("it is there");
            assert!(inside.starts_with(root), "{}", inside.display());
        }
    }
    let outside = names(world.dir.path());
    assert!(outside.iter().all(|name| name == "cache"), "{outside:?}");
    let inside = names(&cache);
    let ours = |name: &String| [".locks", "models--org--name"].contains(&name.as_str());
    assert!(inside.iter().all(ours), "{inside:?}");
    let _ = fs::remove_dir_all(&cache);
});
