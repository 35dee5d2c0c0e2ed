//! Words that the glossary replaces, and their search in a name or a line of prose.
//!
//! [`GLOSSARY`] has a table of these words. Each is in [`REPLACED`] or in [`UNCHECKED`], so a new one is decided here.

use crate::tidy::finding::Finding;
use crate::tidy::tree::Tree;

/// Page with the terms and the words that they replace.
pub(super) const GLOSSARY: &str = "docs/glossary.md";
/// Heading of the table of replaced words in the page.
const HEADING: &str = "## Words not to use";

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
    /// Nouns: a name with the word, and the word in prose after one of [`DETERMINERS`]. `in_turn` and `turn_off` have none.
    Nouns,
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
/// Crates with neither grant windows nor TCP, whose receive window has that name in the RFC.
const NO_WINDOWS: Uses = Uses::NamesIn(&[
    "crates/memory/",
    "crates/nbd/",
    "crates/policy/",
    "crates/ring/",
    "crates/switch/",
    "crates/xenstore/",
]);

/// Words that are searched, with the words to write.
const REPLACED: &[Replaced] = &[
    all("octet", "byte"),
    all("keeper", "supervisor"),
    all("obituary", "exit report"),
    all("last words", "stderr tail"),
    all("seat", "port entry"),
    all("usher", "port binding"),
    all("parcel", "handoff batch"),
    all("news", "event or mailbox"),
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
    all("deed", "attack"),
    all("manieth", "stride"),
    some("thaw", NOT_LINUX, "refill"),
    some("turn", Uses::Nouns, "round, or time quantum"),
    some("quick", Uses::NamesIn(&["crates/"]), "fast path"),
    some("tend", Uses::NamesIn(&[""]), "reclaim or refill"),
    some("patience", PORTS, "backpressure budget"),
    some("reach", PAGES, "page access"),
    some("want", PAGES, "access mode"),
    some("window", NO_WINDOWS, "a name of its own, such as prefetch buffer"),
];

/// Words that are wrong in one sense only, which no program can tell from the others, with a right use. A review looks for
/// them.
const UNCHECKED: &[(&str, &str)] = &[
    ("hold", "a thread holds a lock; backpressure is what a port does to its senders"),
    ("lease", "DHCP leases an address"),
    ("leave", "a process leaves its namespace; a frame that leaves the switch is egress"),
    ("plan", "a scenario plans its checks"),
    ("post", "a frontend posts requests on a ring; between threads there is a mailbox"),
    ("relay", "a process relays the bytes of another"),
    ("rest", "the rest of a buffer; a worker without work follows its idle strategy"),
    ("share", "domains share a page; the scheduler gives a port a time quantum"),
    ("slot", "a ring has slots; the switch has port entries"),
    ("spell", "the guest spells a name; a peer waits for the end of its backoff"),
];

/// Words before a noun.
const DETERMINERS: [&str; 15] = [
    "a", "an", "any", "each", "every", "last", "next", "no", "of", "one", "per", "that", "the",
    "this", "whole",
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
            Uses::Nouns => {
                let before = at.checked_sub(1).map_or("", |at| words[at].as_str());
                let after = words.get(at + own.len()).map_or("", String::as_str);
                let is_noun = match kind {
                    Kind::Name => {
                        !["in", "take", "takes"].contains(&before)
                            && !["into", "off", "on"].contains(&after)
                    }
                    Kind::Prose => DETERMINERS.contains(&before),
                };
                is_noun && is(&["", "s"])
            }
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

/// Returns a finding for each word of the glossary's table that is neither searched nor listed as unchecked.
pub(super) fn undecided(tree: &Tree) -> Vec<Finding> {
    let page = tree.files.get(GLOSSARY).map_or("", String::as_str);
    let lines = page.lines().enumerate().skip_while(|(_, line)| line.trim() != HEADING).skip(1);
    let rows = lines.take_while(|(_, line)| !line.starts_with("## "));
    let rows =
        rows.filter_map(|(i, line)| Some((i + 1, line.strip_prefix("| ")?.split('|').next()?)));
    let mut findings = vec![];
    for (line, cell) in rows.skip(1) {
        for term in without_brackets(cell).split(',').map(str::trim).filter(|term| !term.is_empty())
        {
            let is = |words: &str| {
                let forms = term.split(' ').zip(words.split(' '));
                term.split(' ').count() == words.split(' ').count()
                    && forms.clone().all(|(form, word)| is_form_of(form, word, &["", "s"]))
            };
            let decided = REPLACED.iter().map(|replaced| replaced.words);
            let decided = decided.chain(UNCHECKED.iter().map(|(word, _)| *word));
            if !decided.clone().any(is) {
                let message = format!(
                    "tidy does not know the replaced word \"{term}\": add it to the list in \
                     xtask/src/tidy/language/words.rs"
                );
                findings.push(Finding::at(GLOSSARY, line, message));
            }
        }
    }
    findings
}

/// Returns a cell of a table without its remarks in brackets.
fn without_brackets(cell: &str) -> String {
    let mut depth = 0_u32;
    let outside = cell.chars().filter(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => return depth == 0,
        }
        false
    });
    outside.collect()
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
        assert_eq!(prose("The stderr tail was once the last words."), ["last words"]);
        assert_eq!(prose("an aeroplane, a dataplane, newspapers"), [] as [&str; 0]);
        assert_eq!(found("a.rs", Kind::Name, "TxParcels"), ["parcel"]);
        assert_eq!(found("a.rs", Kind::Name, "is_last_words"), ["last words"]);
    }

    #[test]
    fn noun_is_found_after_its_determiner_and_in_names() {
        let prose = |text: &str| found("docs/a.md", Kind::Prose, text);
        assert_eq!(prose("Each turn ends, and the next turn begins: two of turns."), ["turn"; 3]);
        let verbs = "Turns it off in turn; they take turns, which turns a page into text.";
        assert_eq!(prose(verbs), [] as [&str; 0]);
        assert_eq!(found("a.rs", Kind::Name, "turns_left"), ["turn"]);
        for name in ["turned", "names_in_turn", "turn_off", "peers_take_turns"] {
            assert_eq!(found("a.rs", Kind::Name, name), [] as [&str; 0], "{name}");
        }
    }

    #[test]
    fn word_of_some_directories_is_found_there_only() {
        let name = |path: &str, name: &str| found(path, Kind::Name, name);
        assert_eq!(name("crates/switch/src/a.rs", "patience"), ["patience"]);
        assert_eq!(name("xtask/src/a.rs", "patience"), [] as [&str; 0]);
        assert_eq!(name("crates/block/src/a.rs", "reach_page"), ["reach"]);
        assert_eq!(name("crates/block/src/a.rs", "reached"), [] as [&str; 0]);
        assert_eq!(name("crates/uplink/src/a.rs", "reach"), [] as [&str; 0]);
        assert_eq!(name("crates/net/src/a.rs", "thawed"), ["thaw"]);
        assert_eq!(name("linux/netfront/device.c", "thaw"), [] as [&str; 0]);
        assert_eq!(name("crates/policy/src/a.rs", "window"), ["window"]);
        assert_eq!(name("crates/policy/src/a.rs", "windows"), [] as [&str; 0]);
        assert_eq!(found("crates/policy/src/a.rs", Kind::Prose, "a window"), [] as [&str; 0]);
    }

    #[test]
    fn word_that_the_glossary_adds_is_a_finding() {
        let page = |row: &str| {
            let page =
                format!("| nothing | x |\n{HEADING}\n\n| instead of | write |\n|---|---|\n{row}");
            let findings = undecided(&Tree::from_files([(GLOSSARY, &*page)]));
            findings.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let known = "| octets (except here), last words, hold (of ports, too) | x |\n";
        assert_eq!(page(known), [] as [&str; 0]);
        let found = page("| octets, gadget (of a kind) | x |\n\n## Next\n| other | x |\n");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("docs/glossary.md:6: tidy does not know"), "{found:?}");
        assert!(found[0].contains("\"gadget\""), "{found:?}");
    }

    #[test]
    fn word_is_listed_once() {
        let mut words: Vec<&str> = REPLACED.iter().map(|replaced| replaced.words).collect();
        words.extend(UNCHECKED.iter().map(|(word, _)| *word));
        words.sort_unstable();
        let total = words.len();
        words.dedup();
        assert_eq!(words.len(), total);
    }
}
