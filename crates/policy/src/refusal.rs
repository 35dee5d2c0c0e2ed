//! Refusals as text: for the user, for `policy why`, and for the programs in the guest.
//!
//! | reader | text |
//! |---|---|
//! | user at the terminal, `policy why` | [`sentence`] of a record |
//! | program that asks for the TXT records of `why.HOST` | [`answer`] |
//! | program whose HTTP request on port 80 is denied | [`page`] |
//!
//! Names come from the guest. [`HostName`] holds letters, digits, `-` and `_` alone; [`clean`] replaces control and
//! formatting characters in whatever else is shown. Texts for the guest name no file of the host.

use core::fmt::Write as _;

use crate::name::HostName;
use crate::policy::{Policy, Verdict};
use crate::record::Record;
use crate::rule::Protocol;

/// Maximum length of a text in characters.
pub const TEXT_MAX: usize = 400;
/// First label of the names that ask for a verdict.
pub const QUESTION: &str = "why";

/// Replaces characters that act on a terminal or change the order of a line: controls, and the formatting characters of
/// Unicode (bidirectional, invisible, line and paragraph separators). Cuts a text that is too long.
pub fn clean(text: &str) -> String {
    let is_wrong = |c: char| {
        c.is_control()
            || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}')
            || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
            || matches!(c, '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
    };
    text.chars().map(|c| if is_wrong(c) { '\u{fffd}' } else { c }).take(TEXT_MAX).collect()
}

/// Returns the reading of a name with labels in Punycode (`xn--`), for a person. `None` for other names, and for readings that
/// have more than letters, digits, `-` and `_`. The name itself must be shown beside it: different letters look the same.
pub fn unicode_of(name: &HostName) -> Option<String> {
    let is_readable = |c: char| {
        c.is_alphanumeric()
            || matches!(c, '-' | '_' | '\u{300}'..='\u{36f}' | '\u{900}'..='\u{dff}' | '\u{e00}'..='\u{e7f}')
    };
    let mut has_other_letters = false;
    let read = |label: &str| {
        let Some(encoded) = label.strip_prefix("xn--") else { return Some(label.to_owned()) };
        has_other_letters = true;
        idna::punycode::decode_to_string(encoded).filter(|label| label.chars().all(is_readable))
    };
    let labels: Option<Vec<String>> = name.as_str().split('.').map(read).collect();
    labels.map(|labels| clean(&labels.join("."))).filter(|_| has_other_letters)
}

/// Describes a denial in one line: destination, reason, rule to add.
pub fn sentence(record: &Record) -> String {
    let mut text = format!("denied {}, {}", destination(record), record.reason);
    if let Some(rule) = &record.allow {
        let _ = write!(text, "; `--allow {rule}`");
    }
    clean(&text)
}

/// Describes the destination of a record: name or address, with port, and protocol unless it is TCP.
pub fn destination(record: &Record) -> String {
    let port = record.port.map(|port| format!(":{port}")).unwrap_or_default();
    let protocol = match record.protocol {
        None | Some(Protocol::Tcp) => String::new(),
        Some(protocol) => format!("/{protocol}"),
    };
    match (record.name.as_ref().or(record.sni.as_ref()), record.address) {
        (Some(name), Some(ip)) => format!("{name}{port}{protocol} ({ip})"),
        (Some(name), None) => format!("{name}{port}{protocol}"),
        (None, Some(ip)) if ip.is_ipv6() && !port.is_empty() => format!("[{ip}]{port}{protocol}"),
        (None, Some(ip)) => format!("{ip}{port}{protocol}"),
        (None, None) => "a query".to_owned(),
    }
}

/// Returns the name whose verdict a query asks for: `HOST` of `why.HOST`.
pub fn asked_about(name: &HostName) -> Option<HostName> {
    let host = name.as_str().strip_prefix(QUESTION)?.strip_prefix('.')?;
    HostName::parse(host).ok()
}

/// Describes the verdict on a name to the guest that asks for it.
pub fn answer(policy: &Policy, name: &HostName, verdict: Verdict) -> String {
    let word = if verdict.is_allowed() { "allowed" } else { "denied" };
    let mut text = format!("{word} {name}, {}", policy.describe_to_guest(verdict.cause));
    if let Some(rule) = policy.missing_rule(verdict.cause, Some(name), None)
        && !verdict.is_allowed()
    {
        let _ = write!(text, "; the host allows it by --allow {rule}");
    }
    clean(&text)
}

/// Returns a response of HTTP/1.1 that says why a request was denied. `is_head`: without the body.
pub fn page(sentence: &str, is_head: bool) -> Vec<u8> {
    let body = format!("{}\n", clean(sentence));
    let mut page = format!(
        "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n\
         Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
        body.len()
    );
    if !is_head {
        page.push_str(&body);
    }
    page.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Cause;
    use crate::policy::tests::policy;
    use crate::record::Event;
    use crate::rule::Action;

    fn name(text: &str) -> HostName {
        HostName::parse(text).unwrap()
    }

    fn record(name: Option<&str>, address: Option<&str>, port: u16, protocol: Protocol) -> Record {
        Record {
            event: Event::Connect,
            verdict: Action::Deny,
            name: name.map(str::to_owned),
            address: address.map(|ip| ip.parse().unwrap()),
            port: (port > 0).then_some(port),
            protocol: (port > 0).then_some(protocol),
            reason: "no rule".to_owned(),
            allow: None,
            sni: None,
            bytes_out: None,
            bytes_in: None,
        }
    }

    #[test]
    fn sentence_names_destination_reason_and_rule() {
        let mut query = record(Some("pypi.org"), None, 0, Protocol::Tcp);
        query.allow = Some("pypi.org:443".to_owned());
        assert_eq!(sentence(&query), "denied pypi.org, no rule; `--allow pypi.org:443`");
        for (name, address, protocol, text) in [
            (Some("a.org"), Some("192.0.2.1"), Protocol::Tcp, "a.org:80 (192.0.2.1)"),
            (None, Some("192.0.2.1"), Protocol::Udp, "192.0.2.1:80/udp"),
            (None, Some("2001:db8::1"), Protocol::Tcp, "[2001:db8::1]:80"),
        ] {
            let text = format!("denied {text}, no rule");
            assert_eq!(sentence(&record(name, address, 80, protocol)), text);
        }
    }

    #[test]
    fn sentence_of_a_hostile_record_is_cleaned_and_bounded() {
        let mut hostile = record(Some("a\u{1b}[2J\n\u{202e}gro.b\u{2066}"), None, 0, Protocol::Tcp);
        hostile.reason = "x".repeat(4000);
        hostile.allow = Some("\u{9b}2J\r\u{200b}".to_owned());
        let text = sentence(&hostile);
        assert!(text.starts_with("denied a\u{fffd}[2J\u{fffd}\u{fffd}gro.b\u{fffd}, xx"), "{text}");
        assert_eq!(text.chars().count(), TEXT_MAX);
        hostile.reason.clear();
        assert!(sentence(&hostile).ends_with("`--allow \u{fffd}2J\u{fffd}\u{fffd}`"));
    }

    #[test]
    fn reading_of_a_name_has_letters_alone() {
        for (text, reading) in [
            ("a.org", None),
            ("xn--bcher-kva.example", Some("bücher.example")),
            ("a.xn--p1ai", Some("a.рф")),
            // A right-to-left override, a full stop of another script, a text that is no Punycode.
            ("xn--agro-vd7a.org", None),
            ("xn--orgx-sw3c.com", None),
            ("xn--99999999.org", None),
        ] {
            assert_eq!(unicode_of(&name(text)).as_deref(), reading, "{text}");
        }
    }

    #[test]
    fn missing_rule_allows_what_was_denied() {
        let closed = policy("+x.org:443 -bad.org");
        let (v4, v6) = ("203.0.113.1:80".parse().unwrap(), "[2001:db8::1]:80".parse().unwrap());
        let host = name("y.org");
        for (cause, name, to, rule) in [
            (Cause::NoRule, Some(&host), None, "y.org:443"),
            (Cause::NoRule, Some(&host), Some((v4, Protocol::Tcp)), "y.org:80"),
            (Cause::Quic, Some(&host), Some((v4, Protocol::Udp)), "y.org:80/udp"),
            (Cause::NoPin, None, Some((v4, Protocol::Tcp)), "203.0.113.1:80"),
            (Cause::Special, Some(&host), Some((v6, Protocol::Udp)), "[2001:db8::1]:80/udp"),
        ] {
            assert_eq!(closed.missing_rule(cause, name, to).as_deref(), Some(rule));
            assert!(rule.parse::<crate::Rule>().is_ok());
        }
        for cause in [Cause::Rule(1), Cause::Malformed, Cause::Rebinding, Cause::WildcardLimit] {
            assert_eq!(closed.missing_rule(cause, Some(&host), None), None);
        }
    }

    #[test]
    fn answer_to_the_guest_names_no_file() {
        let mut source = crate::testing::source("+x.org:443 -bad.org");
        source.rules[1].origin = "/home/me/secret.toml:3".to_owned();
        let policy = Policy::new(source).unwrap();
        let text = |host: &str| answer(&policy, &name(host), policy.resolve(&name(host)));
        assert_eq!(text("bad.org"), "denied bad.org, deny bad.org");
        assert_eq!(text("y.org"), "denied y.org, no rule; the host allows it by --allow y.org:443");
        assert_eq!(text("x.org"), "allowed x.org, allow x.org:443");
        assert_eq!(asked_about(&name("why.x.org")), Some(name("x.org")));
        for other in ["why", "whyx.org", "a.why.org"] {
            assert_eq!(asked_about(&name(other)), None, "{other}");
        }
    }

    #[test]
    fn page_has_the_length_that_it_says_and_no_line_of_the_guest() {
        let bytes = page("a\r\nSet-Cookie: x", false);
        let text = core::str::from_utf8(&bytes).unwrap();
        let (header, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(header.contains(&format!("Content-Length: {}\r\n", body.len())), "{header}");
        assert!(header.starts_with("HTTP/1.1 403 ") && !header.contains("Set-Cookie"));
        assert_eq!(body, "a\u{fffd}\u{fffd}Set-Cookie: x\n");
        assert!(page("a", true).ends_with(b"\r\n\r\n"));
    }
}
