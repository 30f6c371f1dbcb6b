//! A hub on this machine: the routes that matter, and everything that can go wrong with them.
//!
//! Large files are sent by a second server on another port, which is another origin, as a content network
//! is for the real one.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A commit for tests.
pub(crate) fn commit(digit: char) -> String {
    digit.to_string().repeat(40)
}

/// What a server is asked to do wrong, for the next so many requests of a kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// Answers 503 so many times.
    pub(crate) unavailable: u32,
    /// Cuts contents after so many bytes, so many times.
    pub(crate) cut: (usize, u32),
    /// Sends other bytes of the same length, so many times.
    pub(crate) corrupt: u32,
    /// Sends the whole file whatever part is asked for.
    pub(crate) ignore_range: bool,
    /// Waits so long before contents.
    pub(crate) delay: Duration,
    /// Sends nothing more after the head of contents, so many times.
    pub(crate) stall: u32,
    /// Gives these headers to `HEAD` instead of its own.
    pub(crate) head: Option<Vec<(&'static str, String)>>,
    /// Sends everything to this address.
    pub(crate) redirect: Option<String>,
    /// Answers the listing with this.
    pub(crate) listing: Option<String>,
}

#[derive(Clone, Debug, Default)]
struct Repo {
    revisions: BTreeMap<String, String>,
    files: BTreeMap<String, Vec<(String, Vec<u8>)>>,
    token: Option<String>,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    /// Whether the content network was asked.
    pub(crate) cdn: bool,
    /// `METHOD PATH`.
    pub(crate) line: String,
    /// Its headers, in small letters.
    pub(crate) headers: Vec<(String, String)>,
}

impl Asked {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }
}

#[derive(Default)]
struct State {
    repos: BTreeMap<String, Repo>,
    faults: Faults,
    asked: Vec<Asked>,
}

/// A hub. Its threads end with the test program.
pub(crate) struct FakeHub {
    pub(crate) address: SocketAddr,
    cdn: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl FakeHub {
    pub(crate) fn start() -> Self {
        let hub = TcpListener::bind("127.0.0.1:0").unwrap();
        let cdn = TcpListener::bind("127.0.0.1:0").unwrap();
        let started = Self {
            address: hub.local_addr().unwrap(),
            cdn: cdn.local_addr().unwrap(),
            state: Arc::default(),
        };
        for (listener, is_cdn) in [(hub, false), (cdn, true)] {
            let (state, cdn) = (Arc::clone(&started.state), started.cdn);
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let state = Arc::clone(&state);
                    // A client that goes away is no failure of the hub.
                    std::thread::spawn(move || serve(stream, &state, is_cdn.then_some(()), cdn));
                }
            });
        }
        started
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Adds a commit to a repository, to which `revision` leads from now on.
    pub(crate) fn add(&self, repo: &str, revision: &str, commit: &str, files: &[(&str, &[u8])]) {
        let mut state = self.state.lock().unwrap();
        let repo = state.repos.entry(repo.into()).or_default();
        repo.revisions.insert(revision.into(), commit.into());
        let files = files
            .iter()
            .map(|(name, bytes)| ((*name).into(), bytes.to_vec()));
        repo.files.insert(commit.into(), files.collect());
    }

    /// Lets only those in who bring a token.
    pub(crate) fn gate(&self, repo: &str, token: &str) {
        let mut state = self.state.lock().unwrap();
        state.repos.get_mut(repo).unwrap().token = Some(token.into());
    }

    pub(crate) fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.state.lock().unwrap().faults);
    }

    /// What was asked since the last time.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.state.lock().unwrap().asked)
    }
}

/// Large files are those with weights.
fn is_lfs(file: &str) -> bool {
    file.ends_with(".gguf") || file.ends_with(".safetensors")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What a hub calls contents.
pub(crate) fn etag(file: &str, bytes: &[u8]) -> String {
    if is_lfs(file) {
        return hex(digest(&SHA256, bytes).as_ref());
    }
    let blob = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, &blob).as_ref())
}

struct Answer {
    status: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

fn answer(
    status: &'static str,
    headers: Vec<(&'static str, String)>,
    body: impl Into<Vec<u8>>,
) -> Answer {
    Answer {
        status,
        headers,
        body: body.into(),
    }
}

fn read_request(stream: &mut BufReader<TcpStream>) -> Option<(String, Vec<(String, String)>)> {
    let mut line = String::new();
    stream.read_line(&mut line).ok().filter(|&read| read > 0)?;
    let mut headers = Vec::new();
    loop {
        let mut header = String::new();
        stream
            .read_line(&mut header)
            .ok()
            .filter(|&read| read > 0)?;
        match header.trim_end().split_once(": ") {
            Some((name, value)) => headers.push((name.to_lowercase(), value.to_owned())),
            None => break,
        }
    }
    let line = line.trim_end().trim_end_matches(" HTTP/1.1").to_owned();
    Some((line, headers))
}

fn serve(
    stream: TcpStream,
    state: &Mutex<State>,
    cdn: Option<()>,
    cdn_at: SocketAddr,
) -> Option<()> {
    let mut out = stream.try_clone().ok()?;
    let mut stream = BufReader::new(stream);
    loop {
        let (line, headers) = read_request(&mut stream)?;
        let asked = Asked {
            cdn: cdn.is_some(),
            line,
            headers,
        };
        let (answer, faults) = {
            let mut state = state.lock().unwrap();
            state.asked.push(asked.clone());
            let answer = respond(&mut state, &asked, cdn_at);
            let faults = state.faults.clone();
            let contents = asked.line.starts_with("GET") && !answer.body.is_empty();
            if contents && answer.status.starts_with('2') && !asked.line.contains("/api/") {
                let faults = &mut state.faults;
                faults.cut.1 = faults.cut.1.saturating_sub(1);
                faults.stall = faults.stall.saturating_sub(1);
            }
            (answer, faults)
        };
        let head = asked.line.starts_with("HEAD");
        let contents = !head && answer.status.starts_with('2') && !asked.line.contains("/api/");
        let mut text = format!("HTTP/1.1 {}\r\n", answer.status);
        for (name, value) in &answer.headers {
            text += &format!("{name}: {value}\r\n");
        }
        if !answer
            .headers
            .iter()
            .any(|(name, _)| *name == "Content-Length")
        {
            text += &format!("Content-Length: {}\r\n", answer.body.len());
        }
        out.write_all((text + "\r\n").as_bytes()).ok()?;
        if head {
            continue;
        }
        if contents {
            std::thread::sleep(faults.delay);
            if faults.stall > 0 {
                std::thread::sleep(Duration::from_secs(600));
            }
            if faults.cut.1 > 0 && faults.cut.0 < answer.body.len() {
                out.write_all(&answer.body[..faults.cut.0]).ok()?;
                return None;
            }
        }
        out.write_all(&answer.body).ok()?;
    }
}

fn respond(state: &mut State, asked: &Asked, cdn: SocketAddr) -> Answer {
    if state.faults.unavailable > 0 {
        state.faults.unavailable -= 1;
        return answer(
            "503 Service Unavailable",
            vec![("Retry-After", "0".into())],
            "",
        );
    }
    if let Some(to) = &state.faults.redirect {
        return answer("307 Temporary Redirect", vec![("Location", to.clone())], "");
    }
    let path = asked.line.split(' ').nth(1).unwrap_or_default();
    let path = path.split('?').next().unwrap_or_default();
    let path = path.replace("%2F", "/").replace("%20", " ");
    let parts: Vec<_> = path.trim_start_matches('/').split('/').collect();
    let not_found = |code: &str| answer("404 Not Found", vec![("X-Error-Code", code.into())], "{}");
    let (repo, rest) = match parts.as_slice() {
        ["api", "models", org, name, "revision", rest @ ..] => {
            (format!("{org}/{name}"), ("api", rest))
        }
        [org, name, "resolve", rest @ ..] => (format!("{org}/{name}"), ("resolve", rest)),
        ["cdn", org, name, rest @ ..] => (format!("{org}/{name}"), ("cdn", rest)),
        _ => return not_found(""),
    };
    let Some(found) = state.repos.get(&repo) else {
        return not_found("RepoNotFound");
    };
    let bearer = format!("Bearer {}", found.token.as_deref().unwrap_or_default());
    let known = asked.header("authorization") == Some(bearer.as_str());
    if found.token.is_some() && rest.0 != "cdn" && !known {
        return answer(
            "401 Unauthorized",
            vec![("X-Error-Code", "GatedRepo".into())],
            "{}",
        );
    }
    if rest.0 == "api" {
        if let Some(listing) = &state.faults.listing {
            return answer("200 OK", Vec::new(), listing.as_bytes());
        }
        let revision = rest.1.join("/");
        let commit = found.revisions.get(&revision).unwrap_or(&revision);
        let Some(files) = found.files.get(commit) else {
            return not_found("RevisionNotFound");
        };
        let names = files
            .iter()
            .map(|(name, _)| format!("{{\"rfilename\": \"{name}\"}}"));
        let names: Vec<_> = names.collect();
        let body = format!(
            "{{\"id\": \"{repo}\", \"modelId\": \"{repo}\", \"sha\": \"{commit}\", \"siblings\": [{}]}}",
            names.join(", ")
        );
        return answer(
            "200 OK",
            vec![("Content-Type", "application/json".into())],
            body,
        );
    }
    let at = rest.1.first().copied().unwrap_or_default().to_owned();
    let commit = found.revisions.get(&at).cloned().unwrap_or(at);
    let name = rest.1.get(1..).unwrap_or_default().join("/");
    let file = found
        .files
        .get(&commit)
        .and_then(|files| files.iter().find(|(n, _)| *n == name));
    let Some((_, bytes)) = file.cloned() else {
        return not_found("EntryNotFound");
    };
    let etag = etag(&name, &bytes);
    let mut headers = vec![
        ("X-Repo-Commit", commit.clone()),
        ("Accept-Ranges", "bytes".into()),
    ];
    if rest.0 == "resolve" && is_lfs(&name) {
        headers.push(("X-Linked-Etag", format!("\"{etag}\"")));
        headers.push(("X-Linked-Size", bytes.len().to_string()));
        headers.push(("ETag", "\"of-the-redirect\"".into()));
        headers.push((
            "Location",
            format!(
                "http://{cdn}/cdn/{repo}/{commit}/{}?Signature=x",
                name.replace(' ', "%20")
            ),
        ));
        return with_head_fault(
            state,
            asked,
            answer("302 Found", headers, "Found. Redirecting"),
        );
    }
    headers.push(("ETag", format!("\"{etag}\"")));
    let whole = bytes.len();
    contents(state, asked, headers, bytes, whole)
}

fn with_head_fault(state: &State, asked: &Asked, answer: Answer) -> Answer {
    match (&state.faults.head, asked.line.starts_with("HEAD")) {
        (Some(headers), true) => Answer {
            headers: headers.clone(),
            ..answer
        },
        _ => answer,
    }
}

fn contents(
    state: &mut State,
    asked: &Asked,
    mut headers: Vec<(&'static str, String)>,
    mut bytes: Vec<u8>,
    whole: usize,
) -> Answer {
    if asked.line.starts_with("HEAD") {
        headers.push(("Content-Length", whole.to_string()));
        return with_head_fault(state, asked, answer("200 OK", headers, ""));
    }
    if state.faults.corrupt > 0 {
        state.faults.corrupt -= 1;
        bytes.iter_mut().for_each(|byte| *byte ^= 1);
    }
    let from = asked.header("range").and_then(|range| {
        range
            .strip_prefix("bytes=")?
            .strip_suffix('-')?
            .parse::<usize>()
            .ok()
    });
    match from.filter(|_| !state.faults.ignore_range) {
        Some(from) if from >= whole => {
            headers.push(("Content-Range", format!("bytes */{whole}")));
            answer("416 Range Not Satisfiable", headers, "")
        }
        Some(from) => {
            headers.push((
                "Content-Range",
                format!("bytes {from}-{}/{whole}", whole - 1),
            ));
            answer("206 Partial Content", headers, &bytes[from..])
        }
        None => answer("200 OK", headers, bytes),
    }
}
