//! Rules of rendering that changed between versions of the engine.

/// Major and minor version of an engine. Unknown versions count as the newest known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(u32, u32);

impl Version {
    /// `reasoning_effort` also sets `enable_thinking`.
    pub(super) const EFFORT_SETS_THINKING: Self = Self(0, 22);
    /// `developer` messages become system messages where the template does not know the role.
    pub(super) const DEVELOPER_TO_SYSTEM: Self = Self(0, 23);
    /// Prompt token ids in `kv_transfer_params` replace rendering.
    pub(super) const REUSED_TOKEN_IDS: Self = Self(0, 27);
    /// The billing header line is cut from system messages of chat requests.
    pub(super) const CHAT_BILLING_HEADER: Self = Self(0, 32);
    /// `/tokenize` prepares messages like a chat request, `reasoning_content` included.
    pub(super) const TOKENIZE_IS_CHAT: Self = Self(0, 33);
    /// Detection of the content format follows namespace attributes.
    pub(super) const NAMESPACE_DETECTION: Self = Self(0, 33);

    /// Reads the leading `major.minor` of a version string.
    pub(super) fn parse(text: &str) -> Self {
        let mut numbers = text.trim_start_matches('v').split(|c: char| !c.is_ascii_digit()).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Self(major, minor),
            _ => Self::default(),
        }
    }
}

impl Default for Version {
    fn default() -> Self {
        Self(u32::MAX, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_number_and_the_unknown_is_newest() {
        assert!(Version::parse("0.9.2") < Version::parse("v0.32.0+cpu"));
        assert_eq!(Version::parse("0.32.0"), Version::CHAT_BILLING_HEADER);
        assert!(Version::parse("main") > Version::NAMESPACE_DETECTION);
    }
}
