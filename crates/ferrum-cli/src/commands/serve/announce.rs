//! What a server says when it begins: where it is, what it serves, and who may ask.

use crate::{logging, ui};
use ferrum_server::ModelSummary;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use tracing::level_filters::LevelFilter;

/// A server that has begun.
pub(super) struct Start {
    pub(super) address: SocketAddr,
    pub(super) tls: bool,
    pub(super) models: Vec<ModelSummary>,
    /// Which device has which layers, where several share them.
    pub(super) layers: Option<String>,
    /// Keys of which requests must bring one; 0: none is asked for.
    pub(super) keys: usize,
    pub(super) level: LevelFilter,
}

/// Says it: as a block for a person, or as an event where the log is for programs.
pub(super) fn announce(start: &Start) {
    if !logging::is_json() {
        return ui::say(start.block().trim_end());
    }
    let names = start.models.iter().map(|model| model.name.as_str());
    tracing::info!(
        chat_page = start.url("/"),
        api_base = start.url("/v1"),
        models = names.collect::<Vec<_>>().join(","),
        layers = start.layers,
        keys = start.keys,
        "serving"
    );
    for model in &start.models {
        let (context, kv_tokens) = (model.context, model.kv_tokens);
        tracing::info!(model = model.name, context, kv_tokens, "model to serve");
    }
}

impl Start {
    /// Where a path is, for a client on this machine.
    fn url(&self, path: &str) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        // No browser takes the address that means all of them.
        let host = match self.address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        let address = SocketAddr::new(host, self.address.port());
        format!("{scheme}://{address}{path}")
    }

    fn block(&self) -> String {
        let mut rows = Vec::new();
        // A model that is not loaded may be one to chat with.
        let chats = |model: &ModelSummary| model.kind.is_none_or(|kind| kind == "decoder");
        if self.models.iter().any(chats) {
            rows.push(("chat page", self.url("/")));
        }
        rows.push(("API base", self.url("/v1")));
        if self.address.ip().is_unspecified() {
            rows.push(("listens on", format!("{}, all addresses", self.address)));
        }
        for model in &self.models {
            let name = &model.name;
            let row = match (model.kind, model.context, model.kv_tokens) {
                (None, ..) => format!("{name}, loaded when it is asked for"),
                (_, Some(context), Some(kv)) => {
                    format!("{name}, context {context} tokens, KV cache {kv} tokens")
                }
                (Some(kind), Some(context), _) => {
                    format!("{name}, {kind}, texts up to {context} tokens")
                }
                (Some(kind), ..) => format!("{name}, {kind}"),
            };
            rows.push(("model", row));
        }
        if let Some(layers) = &self.layers {
            rows.push(("layers", layers.replace(',', ", ")));
        }
        let keys = match self.keys {
            0 if self.address.ip().is_loopback() => "none".into(),
            0 => {
                "none: whoever reaches this address can use it; --api-key-file asks for keys".into()
            }
            n => n.to_string(),
        };
        rows.push(("keys", keys));
        rows.push(("log level", self.level.to_string()));
        let mut text = "ferrum is serving\n".to_owned();
        for (label, value) in rows {
            // Writing to a string does not fail.
            let _ = writeln!(text, "  {label:<10}  {value}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_says_where_what_and_for_whom() {
        let model = |name: &str, kind, context, kv_tokens| ModelSummary {
            name: name.into(),
            kind,
            context,
            kv_tokens,
        };
        let here = Start {
            address: ([127, 0, 0, 1], 8000).into(),
            tls: false,
            models: vec![model(
                "ferrum-demo",
                Some("decoder"),
                Some(1024),
                Some(16384),
            )],
            layers: None,
            keys: 0,
            level: LevelFilter::INFO,
        };
        insta::assert_snapshot!("one_model_here", here.block());
        let speech = Start {
            models: vec![model("whisper", Some("speech"), None, None)],
            ..here
        };
        assert!(!speech.block().contains("chat page"));
        let everywhere = Start {
            address: (Ipv6Addr::UNSPECIFIED, 443).into(),
            tls: true,
            models: vec![
                model("small", Some("decoder"), Some(4096), Some(65536)),
                model("bert", Some("encoder"), Some(512), None),
                model("whisper", Some("speech"), None, None),
                model("large", None, None, None),
            ],
            layers: None,
            keys: 2,
            level: LevelFilter::WARN,
        };
        insta::assert_snapshot!("four_models_everywhere", everywhere.block());
        let open = Start {
            address: ([192, 0, 2, 1], 80).into(),
            models: Vec::new(),
            layers: Some("cpu:0-13,vulkan:14-27".into()),
            ..here
        };
        let block = open.block();
        assert!(
            block.contains("  layers      cpu:0-13, vulkan:14-27\n"),
            "{block}"
        );
        assert!(
            block.contains("none: whoever reaches this address"),
            "{block}"
        );
    }
}
