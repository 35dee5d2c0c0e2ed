//! Policies that come with Ringfence. The files are in the package's directory `policies`, and also part of the program.

use clap::builder::PossibleValuesParser;
use ringfence_policy::{PolicySource, file};

/// Returns names and texts of the files with these names.
macro_rules! presets {
    ($($name:literal),+) => {
        [$(($name, include_str!(concat!("../../policies/", $name, ".toml"))),)+]
    };
}

const PRESETS: [(&str, &str); 12] = presets!(
    "pypi",
    "npm",
    "crates",
    "go",
    "maven",
    "rubygems",
    "conda",
    "debian",
    "ubuntu",
    "docker",
    "github",
    "huggingface"
);

/// Returns the parser of a preset's name.
pub fn parser() -> PossibleValuesParser {
    PossibleValuesParser::new(PRESETS.map(|(name, _)| name))
}

/// Returns the file of a preset.
pub fn text(name: &str) -> anyhow::Result<&'static str> {
    let preset = PRESETS.iter().find(|(known, _)| *known == name);
    let (_, text) = preset.ok_or_else(|| anyhow::anyhow!("there is no preset `{name}`"))?;
    Ok(text)
}

/// Returns the policy of a preset.
pub fn read(name: &str) -> anyhow::Result<PolicySource> {
    Ok(file::parse(&format!("preset {name}"), text(name)?)?)
}

#[cfg(test)]
mod tests {
    use ringfence_policy::{Action, Policy};

    use super::*;

    #[test]
    fn each_file_of_the_directory_is_a_preset() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/policies");
        let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        let mut names: Vec<_> =
            files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
        names.sort();
        let mut known = PRESETS.map(|(name, _)| name.to_owned());
        known.sort();
        assert_eq!(names, known);
    }

    #[test]
    fn each_preset_is_a_policy_that_denies_the_rest() {
        for (name, _) in PRESETS {
            let policy = Policy::new(read(name).unwrap()).unwrap();
            assert!(policy.default_action() == Action::Deny && !policy.is_empty(), "{name}");
        }
    }
}
