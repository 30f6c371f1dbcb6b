//! Pages of other sites.

use super::{Reply, Running};
use ferrum_server::ServerConfig;

const HERE: (&str, &str) = ("Origin", "https://chat.example");
const ELSEWHERE: (&str, &str) = ("Origin", "https://evil.example");
const KEY: (&str, &str) = ("Authorization", "Bearer secret");

fn server(origins: &[&str]) -> Running {
    Running::configured(ServerConfig {
        api_keys: vec!["secret".into()],
        cors_origins: origins.iter().map(|text| text.parse().unwrap()).collect(),
        ..ServerConfig::default()
    })
}

fn ask_first(server: &Running, origin: (&str, &str)) -> Reply {
    let headers = [
        origin,
        ("Access-Control-Request-Method", "POST"),
        (
            "Access-Control-Request-Headers",
            "authorization,content-type,x-stainless-os",
        ),
    ];
    server.send("OPTIONS", "/v1/chat/completions", &headers, b"")
}

const ALLOWED: &str = "access-control-allow-origin";

#[test]
fn by_default_no_site_may_ask() {
    let server = server(&[]);
    let reply = ask_first(&server, HERE);
    assert_eq!((reply.status, reply.header(ALLOWED)), (401, None));
    let reply = server.send("GET", "/v1/models", &[HERE, KEY], b"");
    assert_eq!((reply.status, reply.header(ALLOWED)), (200, None));
}

#[test]
fn a_site_that_is_named_may_ask_and_needs_the_key_only_then() {
    let server = server(&["https://other.example", "https://chat.example"]);
    let reply = ask_first(&server, HERE);
    assert_eq!((reply.status, reply.header(ALLOWED)), (200, Some(HERE.1)));
    let headers = reply.header("access-control-allow-headers").unwrap();
    assert!(headers.contains("authorization") && headers.contains("x-stainless-os"));
    assert!(
        reply
            .header("access-control-allow-methods")
            .unwrap()
            .contains("POST")
    );
    assert_eq!(reply.header("access-control-allow-credentials"), None);
    assert!(
        reply
            .header("vary")
            .unwrap()
            .to_lowercase()
            .contains("origin")
    );

    let reply = server.send("GET", "/v1/models", &[HERE, KEY], b"");
    assert_eq!((reply.status, reply.header(ALLOWED)), (200, Some(HERE.1)));
    // The page can read why it is refused.
    let reply = server.send("GET", "/v1/models", &[HERE], b"");
    assert_eq!((reply.status, reply.header(ALLOWED)), (401, Some(HERE.1)));

    assert_eq!(ask_first(&server, ELSEWHERE).header(ALLOWED), None);
    let reply = server.send("GET", "/v1/models", &[ELSEWHERE, KEY], b"");
    assert_eq!(reply.header(ALLOWED), None);
}

#[test]
fn all_sites_may_ask_but_not_with_what_browsers_add() {
    let server = server(&["*"]);
    let reply = ask_first(&server, ELSEWHERE);
    assert_eq!((reply.status, reply.header(ALLOWED)), (200, Some("*")));
    assert_eq!(reply.header("access-control-allow-credentials"), None);
    let reply = server.send("GET", "/v1/models", &[ELSEWHERE], b"");
    assert_eq!((reply.status, reply.header(ALLOWED)), (401, Some("*")));
}
