//! Command-line flags of the form `--name value`.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

/// Parsed flags. Every flag takes one value; a flag may come several times.
#[derive(Debug, Default)]
pub struct Flags(HashMap<String, Vec<String>>);

/// What is wrong with the command line.
#[derive(Debug, PartialEq, Eq)]
pub struct FlagError(String);

impl fmt::Display for FlagError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for FlagError {}

impl Flags {
    /// Reads the arguments of this process; `known` lists the names that are accepted.
    pub fn from_env(known: &[&str]) -> Result<Self, FlagError> {
        Self::parse(std::env::args().skip(1), known)
    }

    fn parse(arguments: impl IntoIterator<Item = String>, known: &[&str]) -> Result<Self, FlagError> {
        let mut flags = Self::default();
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let name = argument.strip_prefix("--").filter(|name| known.contains(name));
            let name =
                name.ok_or_else(|| FlagError(format!("unknown argument {argument}; known: --{}", known.join(", --"))))?;
            let value = arguments.next().ok_or_else(|| FlagError(format!("--{name} needs a value")))?;
            flags.0.entry(name.to_owned()).or_default().push(value);
        }
        Ok(flags)
    }

    /// The last value of a flag, or `default`.
    pub fn get<T: FromStr>(&self, name: &str, default: T) -> Result<T, FlagError> {
        self.last(name).map_or(Ok(default), |text| convert(name, text))
    }

    /// The last value of a flag that must be there.
    pub fn require<T: FromStr>(&self, name: &str) -> Result<T, FlagError> {
        let text = self.last(name).ok_or_else(|| FlagError(format!("--{name} is needed")))?;
        convert(name, text)
    }

    /// All values of a flag that may be repeated.
    pub fn all<T: FromStr>(&self, name: &str) -> Result<Vec<T>, FlagError> {
        self.0.get(name).into_iter().flatten().map(|text| convert(name, text)).collect()
    }

    fn last(&self, name: &str) -> Option<&String> {
        self.0.get(name).and_then(|values| values.last())
    }
}

fn convert<T: FromStr>(name: &str, text: &str) -> Result<T, FlagError> {
    text.parse().map_err(|_| FlagError(format!("--{name}: cannot read {text:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Flags, FlagError> {
        Flags::parse(line.split_whitespace().map(str::to_owned), &["pid", "seconds"])
    }

    #[test]
    fn flags_have_defaults_and_may_repeat() {
        let flags = parse("--pid 1 --pid 2").unwrap();
        assert_eq!(flags.all::<u32>("pid").unwrap(), [1, 2]);
        assert!((flags.get("seconds", 1.5_f64).unwrap() - 1.5).abs() < f64::EPSILON);
    }

    #[test]
    fn unknown_and_unreadable_flags_are_refused() {
        assert!(parse("--colour red").is_err());
        assert!(parse("--pid").is_err());
        assert!(parse("--pid x").unwrap().all::<u32>("pid").is_err());
        assert!(parse("").unwrap().require::<u32>("pid").is_err());
    }
}
