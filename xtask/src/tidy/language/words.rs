//! Words that the glossary replaces, and their search in a name or a line of prose.
//!
//! [`GLOSSARY`] has a table of these words.

/// Page with the terms and the words that they replace.
pub(super) const GLOSSARY: &str = "docs/glossary.md";

/// Word or phrase that the glossary replaces.
pub(super) struct Replaced {
    /// Words in lower case.
    pub(super) words: &'static str,
    pub(super) instead: &'static str,
    uses: Uses,
}

/// Uses of a word that are wrong. All others have another sense.
#[derive(Clone, Copy)]
enum Uses {
    /// Every use, inflected forms included.
    All,
    /// Names that contain exactly this word, in these directories.
    NamesIn(&'static [&'static str]),
    /// Every use in these directories.
    AllIn(&'static [&'static str]),
}

const fn all(words: &'static str, instead: &'static str) -> Replaced {
    Replaced { words, instead, uses: Uses::All }
}

const fn some(words: &'static str, uses: Uses, instead: &'static str) -> Replaced {
    Replaced { words, instead, uses }
}

/// Everything except `linux/`: the kernel has this word for the end of hibernation.
const NOT_LINUX: Uses = Uses::AllIn(&[
    "clients/", "crates/", "dist/", "docs/", "fuzz/", "tools/", "vm/", "xen/", "xtask/",
]);
/// Crates that reach a granted page.
const PAGES: Uses = Uses::NamesIn(&["crates/access/", "crates/block/", "crates/net/"]);
/// Crates that have ports.
const PORTS: Uses = Uses::AllIn(&["crates/frame/", "crates/net/", "crates/switch/"]);
/// Words that are searched, with the words to write.
const REPLACED: &[Replaced] = &[
    all("octet", "byte"),
    all("keeper", "supervisor"),
    all("obituary", "exit report"),
    all("seat", "port entry"),
    all("usher", "port binding"),
    all("parcel", "handoff batch"),
    all("inbox", "mailbox"),
    all("outbox", "mailbox"),
    all("plane", "worker"),
    all("police", "rate policy, rate limiter or address filter"),
    all("squeeze", "shrink"),
    all("stock up", "refill"),
    all("rude", "rule violation"),
    all("manners", "penalty"),
    all("condemn", "penalty"),
    all("forgive", "penalty"),
    all("conversation", "connection, association or flow"),
    all("table flipping", "forwarding database swap"),
    all("quick way", "fast path"),
    all("quick path", "fast path"),
    all("short way", "fast path"),
    all("long way", "slow path"),
    all("rogue", "adversary"),
    all("manieth", "stride"),
    some("thaw", NOT_LINUX, "refill"),
    some("quick", Uses::NamesIn(&["crates/"]), "fast path"),
    some("tend", Uses::NamesIn(&[""]), "reclaim or refill"),
    some("patience", PORTS, "backpressure budget"),
    some("want", PAGES, "access mode"),
];

/// Text in which words are searched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Name,
    Prose,
}

/// Returns the replaced words in a name, or in a line of prose, of the file at `path`.
pub(super) fn find(path: &str, kind: Kind, text: &str) -> Vec<&'static Replaced> {
    let words = split(text);
    let at = |at: usize| REPLACED.iter().find(|replaced| replaced.is_at(path, kind, &words, at));
    (0..words.len()).filter_map(at).collect()
}

impl Replaced {
    /// Returns `true` if this word is the one at `at`, used in a wrong sense.
    fn is_at(&self, path: &str, kind: Kind, words: &[String], at: usize) -> bool {
        let own: Vec<&str> = self.words.split(' ').collect();
        let Some(found) = words.get(at..at + own.len()) else { return false };
        let is = |endings: &[&str]| {
            own.iter().zip(found).all(|(own, found)| is_form_of(found, own, endings))
        };
        let is_in = |folders: &[&str]| folders.iter().any(|folder| path.starts_with(folder));
        match self.uses {
            Uses::All => is(&["", "s", "d", "ed", "ing"]),
            Uses::AllIn(folders) => is_in(folders) && is(&["", "s", "d", "ed", "ing"]),
            Uses::NamesIn(folders) => kind == Kind::Name && is_in(folders) && is(&[""]),
        }
    }
}

/// Returns `true` if `word` is `stem` with one of these endings. A stem drops its `e` before `ing`.
fn is_form_of(word: &str, stem: &str, endings: &[&str]) -> bool {
    let ending = |stem: &str| word.strip_prefix(stem).is_some_and(|rest| endings.contains(&rest));
    let short = stem.strip_suffix('e').filter(|_| word.ends_with("ing"));
    ending(stem) || short.is_some_and(ending)
}

/// Returns the words of prose or of a name in lower case. `TxParcel` and `tx_parcel` have two.
fn split(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut lower = false;
    for c in text.chars() {
        let starts = c.is_uppercase() && lower;
        if !c.is_alphanumeric() || starts {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| c.is_alphanumeric()) {
            word.extend(c.to_lowercase());
        }
        lower = c.is_lowercase();
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, kind: Kind, text: &str) -> Vec<&'static str> {
        find(path, kind, text).iter().map(|replaced| replaced.words).collect()
    }

    #[test]
    fn word_is_found_in_every_form_and_alone_only() {
        let prose = |text: &str| found("docs/a.md", Kind::Prose, text);
        assert_eq!(prose("It squeezes, squeezed and is squeezing."), ["squeeze"; 3]);
        assert_eq!(prose("an aeroplane, a dataplane, newspapers"), [] as [&str; 0]);
        assert_eq!(found("a.rs", Kind::Name, "TxParcels"), ["parcel"]);
        assert_eq!(found("a.rs", Kind::Name, "is_short_way"), ["short way"]);
    }

    #[test]
    fn word_of_some_directories_is_found_there_only() {
        let name = |path: &str, name: &str| found(path, Kind::Name, name);
        assert_eq!(name("crates/switch/src/a.rs", "patience"), ["patience"]);
        assert_eq!(name("xtask/src/a.rs", "patience"), [] as [&str; 0]);
        assert_eq!(name("crates/block/src/a.rs", "want_page"), ["want"]);
        assert_eq!(name("crates/block/src/a.rs", "wanted"), [] as [&str; 0]);
        assert_eq!(name("crates/uplink/src/a.rs", "want"), [] as [&str; 0]);
        assert_eq!(name("crates/net/src/a.rs", "thawed"), ["thaw"]);
        assert_eq!(name("linux/netfront/device.c", "thaw"), [] as [&str; 0]);
    }

    #[test]
    fn word_is_listed_once() {
        let mut words: Vec<&str> = REPLACED.iter().map(|replaced| replaced.words).collect();
        words.sort_unstable();
        let total = words.len();
        words.dedup();
        assert_eq!(words.len(), total);
    }
}
