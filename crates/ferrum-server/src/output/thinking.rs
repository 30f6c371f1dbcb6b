//! The markers between which models write their reasoning. Harmony has channels instead
//! ([`harmony`](super::harmony)).

/// A pair of markers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Thinking {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
}

/// One row for each form; a template that speaks of several has the first.
const FORMS: [Thinking; 4] = [
    // DeepSeek, Qwen 3, GLM, Kimi K2, Granite 3.3 and 4.
    Thinking {
        open: "<think>",
        close: "</think>",
    },
    // Magistral, Ministral 3.
    Thinking {
        open: "[THINK]",
        close: "[/THINK]",
    },
    // Kimi-VL.
    Thinking {
        open: "◁think▷",
        close: "◁/think▷",
    },
    // Granite 3.2.
    Thinking {
        open: "Here is my thought process:",
        close: "Here is my response:",
    },
];

impl Default for Thinking {
    fn default() -> Self {
        FORMS[0]
    }
}

impl Thinking {
    /// The markers of which a chat template speaks.
    pub(crate) fn of_template(source: &str) -> Option<Self> {
        let says = |form: &&Thinking| source.contains(form.open) || source.contains(form.close);
        FORMS.iter().find(says).copied()
    }
}
