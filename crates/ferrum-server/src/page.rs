//! The chat page at `/`: one document with all that it needs, so nothing is loaded from elsewhere.
//!
//! It is written as a page, a style sheet and small modules under `page/`, and put together here when the
//! server starts. So there is no build step, and its Content-Security-Policy names each script and style
//! by its hash: whatever a model writes, nothing else runs. The document holds no secret (it is this
//! repository's source), so it is also what is answered without a key, under status 401: it asks for one.

use axum::body::{Body, Bytes};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderMap, HeaderValue,
    IF_NONE_MATCH, REFERRER_POLICY, WWW_AUTHENTICATE,
};
use axum::http::{HeaderName, StatusCode};
use axum::response::Response;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD, Engine};
use ring::digest::{SHA256, digest};

const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const EARLY: &str = include_str!("page/early.js");

/// Libraries as their makers released them (`tools/page/vendor.sh`): scripts of their own, each of which
/// defines one global name.
const LIBRARIES: &[&str] = &[
    include_str!("page/vendor/temml.min.js"),
    include_str!("page/vendor/highlight.min.js"),
];

/// Each after those that it imports.
const MODULES: &[(&str, &str)] = &[
    ("dom.js", include_str!("page/dom.js")),
    ("inline.js", include_str!("page/inline.js")),
    ("markdown.js", include_str!("page/markdown.js")),
    ("memo.js", include_str!("page/memo.js")),
    ("math.js", include_str!("page/math.js")),
    ("mathml.js", include_str!("page/mathml.js")),
    ("highlight.js", include_str!("page/highlight.js")),
    ("render.js", include_str!("page/render.js")),
    ("events.js", include_str!("page/events.js")),
    ("tree.js", include_str!("page/tree.js")),
    ("storage.js", include_str!("page/storage.js")),
    ("api.js", include_str!("page/api.js")),
    ("answer.js", include_str!("page/answer.js")),
    ("settings.js", include_str!("page/settings.js")),
    ("runs.js", include_str!("page/runs.js")),
    ("message.js", include_str!("page/message.js")),
    ("thread.js", include_str!("page/thread.js")),
    ("sidebar.js", include_str!("page/sidebar.js")),
    ("suggestions.js", include_str!("page/suggestions.js")),
    ("header.js", include_str!("page/header.js")),
    ("panel.js", include_str!("page/panel.js")),
    ("key.js", include_str!("page/key.js")),
    ("search.js", include_str!("page/search.js")),
    ("palette.js", include_str!("page/palette.js")),
    ("files.js", include_str!("page/files.js")),
    ("attachments.js", include_str!("page/attachments.js")),
    ("transfer.js", include_str!("page/transfer.js")),
    ("exchange.js", include_str!("page/exchange.js")),
    ("main.js", include_str!("page/main.js")),
];

/// The page as it is sent.
#[derive(Debug)]
pub(crate) struct Page {
    document: Bytes,
    etag: HeaderValue,
    policy: HeaderValue,
}

impl Page {
    pub(crate) fn new() -> Self {
        let script = link(MODULES);
        let libraries = LIBRARIES
            .iter()
            .map(|text| format!("<script>{text}</script>\n"));
        // The libraries last: a text that was put in is not looked at again.
        let document = PAGE
            .replace("<!-- early.js -->", &format!("<script>{EARLY}</script>"))
            .replace("<!-- page.css -->", &format!("<style>{STYLE}</style>"))
            .replace(
                "<!-- script -->",
                &format!("<script type=\"module\">{script}</script>"),
            )
            .replace("<!-- libraries -->", &libraries.collect::<String>());
        let hash = |text: &str| {
            let hash = BASE64_STANDARD.encode(digest(&SHA256, text.as_bytes()));
            format!("'sha256-{hash}'")
        };
        let scripts = [EARLY, &script]
            .into_iter()
            .chain(LIBRARIES.iter().copied());
        let scripts: Vec<_> = scripts.map(hash).collect();
        let policy = format!(
            "default-src 'none'; script-src {}; style-src {}; \
             img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; \
             frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
            scripts.join(" "),
            hash(STYLE),
        );
        let name = BASE64_URL_SAFE_NO_PAD.encode(digest(&SHA256, document.as_bytes()));
        // Both are ASCII: base64 and the words above.
        let header = |text: String| HeaderValue::try_from(text).expect("a header of ASCII");
        Self {
            document: document.into(),
            etag: header(format!("\"{name}\"")),
            policy: header(policy),
        }
    }

    /// The answer to a request with these headers.
    pub(crate) fn answer(&self, request: &HeaderMap) -> Response {
        let known = request.get_all(IF_NONE_MATCH).iter();
        let known = known.filter_map(|value| value.to_str().ok());
        let etag = self.etag.to_str().unwrap_or_default();
        let mut tags = known.flat_map(|value| value.split(','));
        let same = tags.any(|tag| tag.trim().trim_start_matches("W/") == etag);
        let mut response = match same {
            true => self.response(StatusCode::NOT_MODIFIED, Bytes::new()),
            false => self.response(StatusCode::OK, self.document.clone()),
        };
        // It may be kept, but whether it is still the same is asked each time.
        let headers = response.headers_mut();
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert(ETAG, self.etag.clone());
        response
    }

    /// The answer to who has no key: a browser shows the page, which asks for one.
    pub(crate) fn locked(&self) -> Response {
        let mut response = self.response(StatusCode::UNAUTHORIZED, self.document.clone());
        let headers = response.headers_mut();
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }

    fn response(&self, status: StatusCode, body: Bytes) -> Response {
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_SECURITY_POLICY, self.policy.clone());
        for (name, value) in [
            (CONTENT_TYPE, "text/html; charset=utf-8"),
            (REFERRER_POLICY, "no-referrer"),
            (
                HeaderName::from_static("cross-origin-opener-policy"),
                "same-origin",
            ),
            (
                HeaderName::from_static("cross-origin-resource-policy"),
                "same-origin",
            ),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        response
    }
}

/// Modules as one script: each becomes a function that gives what it exports, so that its other names are
/// its own. Imports are one line each and name what a module before has exported.
fn link(modules: &[(&str, &str)]) -> String {
    let mut script = String::new();
    for (_, module) in modules {
        let exports: Vec<_> = module.lines().filter_map(exported).collect();
        let exports = exports.join(", ");
        script.push_str(&format!("const {{ {exports} }} = (() => {{\n"));
        for line in module.lines().filter(|line| !line.starts_with("import ")) {
            script.push_str(line.strip_prefix("export ").unwrap_or(line));
            script.push('\n');
        }
        script.push_str(&format!("return {{ {exports} }};\n}})();\n"));
    }
    script
}

/// The name that a line of a module exports.
fn exported(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("export ")?;
    let rest = rest.strip_prefix("async ").unwrap_or(rest);
    let kinds = ["const ", "class ", "function* ", "function "];
    let name = kinds.iter().find_map(|kind| rest.strip_prefix(kind))?;
    let end = name.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    Some(&name[..end.unwrap_or(name.len())])
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrum_test_support::skip;
    use std::collections::BTreeSet;
    use std::process::Command;

    #[test]
    fn imports_are_what_earlier_modules_export() {
        let mut known = BTreeSet::new();
        let mut names = BTreeSet::new();
        for (file, module) in MODULES {
            for line in module.lines() {
                if line.starts_with("import") {
                    let rest = line.strip_prefix("import { ").expect(line);
                    let (list, from) = rest.split_once(" } from \"./").expect(line);
                    let from = from.strip_suffix("\";").expect(line);
                    for name in list.split(", ") {
                        assert!(known.contains(&(from, name)), "{file}: {line}");
                    }
                }
                if line.starts_with("export") {
                    let name = exported(line).expect(line);
                    assert!(names.insert(name), "{file}: a second {name}");
                    known.insert((*file, name));
                }
            }
        }
    }

    #[test]
    fn the_document_is_whole_and_its_policy_names_its_scripts() {
        let page = Page::new();
        let text = std::str::from_utf8(&page.document).expect("UTF-8");
        for part in ["early.js", "page.css", "script", "libraries"] {
            assert!(!text.contains(&format!("<!-- {part} -->")), "{part}");
        }
        assert_eq!(text.matches("</script").count(), 2 + LIBRARIES.len());
        // In a script, these would begin a part in which `</script>` ends nothing.
        for library in LIBRARIES {
            let library = library.to_ascii_lowercase();
            for (at, tag) in library.match_indices("<script") {
                let next = library[at + tag.len()..].chars().next();
                assert!(
                    !next.is_some_and(|c| c.is_whitespace() || "/>".contains(c)),
                    "a tag in a library"
                );
            }
        }
        assert_eq!(text.matches("<script>").count(), 1 + LIBRARIES.len());
        assert_eq!(text.matches("<style>").count(), 1);
        // Neither inline handlers nor inline styles, which the policy would forbid.
        for forbidden in ["style=", "onclick=", "onload=", "onsubmit="] {
            assert!(!PAGE.contains(forbidden), "{forbidden}");
        }
        for (name, module) in MODULES {
            for forbidden in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "eval(",
                "document.write",
            ] {
                assert!(!module.contains(forbidden), "{name}: {forbidden}");
            }
        }
        let mut rest = text;
        let tags = [
            ("<script>", "</script>"),
            ("<style>", "</style>"),
            ("<script>", "</script>"),
            ("<script>", "</script>"),
            ("<script type=\"module\">", "</script>"),
        ];
        for (tag, end) in tags {
            let (_, inside) = rest.split_once(tag).expect(tag);
            let (inside, after) = inside.split_once(end).expect(tag);
            let hash = BASE64_STANDARD.encode(digest(&SHA256, inside.as_bytes()));
            let policy = page.policy.to_str().expect("ASCII");
            assert!(policy.contains(&format!("'sha256-{hash}'")), "{tag}");
            rest = after;
        }
    }

    #[test]
    fn it_is_sent_again_only_when_it_changed() {
        let page = Page::new();
        let mut headers = HeaderMap::new();
        assert_eq!(page.answer(&headers).status(), 200);
        headers.insert(IF_NONE_MATCH, HeaderValue::from_static("\"other\""));
        assert_eq!(page.answer(&headers).status(), 200);
        let tags = format!("\"other\", W/{}", page.etag.to_str().expect("ASCII"));
        headers.insert(IF_NONE_MATCH, tags.parse().expect("a header"));
        assert_eq!(page.answer(&headers).status(), 304);
        assert_eq!(page.locked().status(), 401);
    }

    #[test]
    fn modules_do_what_they_say() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/page");
        let node = Command::new("node")
            .arg("--test")
            .current_dir(folder)
            .output();
        let Ok(output) = node else {
            return skip("there is no Node.js");
        };
        let words = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{words}");
    }
}
