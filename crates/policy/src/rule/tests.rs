use proptest::prelude::*;

use super::*;

fn rule(text: &str) -> Rule {
    text.parse().unwrap_or_else(|error: RuleError| panic!("{text}: {error}\n{}", error.caret(text)))
}

#[test]
fn rule_of_each_form_is_printed_as_written() {
    for text in [
        "example.org",
        "example.org:443",
        "*.example.org:80,443,8000-8010/tcp",
        ".example.org:443/tcp",
        "example.org:*/udp",
        "10.0.0.0/8",
        "0.0.0.0/0:53/udp",
        "192.0.2.7:22",
        "192.0.2.7/tcp",
        "[2001:db8::]/32:443/tcp",
        "[2001:db8::1]:443",
        "[2001:db8::1]",
        "icmp",
        "example.org bytes=10M",
        "*.example.org:80,443/tcp bytes=1023 connections=100 at-once=5",
        "[2001:db8::]/32 at-once=1",
        "192.0.2.7:22 bytes=3T",
    ] {
        assert_eq!(rule(text).to_string(), text);
    }
    assert_eq!(rule("2001:db8::/32"), rule("[2001:db8::]/32"));
    assert_eq!(rule("::/0/tcp"), rule("[::]/0/tcp"));
    assert_eq!(rule("Example.ORG."), rule("example.org"));
    let limits = rule("a.org connections=7 bytes=2048K").limits;
    assert_eq!(limits, Limits { bytes: Some(2 << 20), connections: Some(7), at_once: None });
}

#[test]
fn wrong_rule_is_rejected_at_its_position() {
    for (text, at) in [
        ("", 0),
        ("exam ple.org", 4),
        ("example.org:", 12),
        ("example.org:0", 12),
        ("example.org:443,", 16),
        ("example.org:http", 12),
        ("example.org:90-80", 12),
        ("example.org:80-", 15),
        ("example.org:70000", 12),
        ("example.org/sctp", 12),
        ("example.org:443/", 16),
        ("*example.org", 1),
        ("*", 1),
        ("*.", 2),
        (".", 1),
        ("..example.org", 1),
        (".*.example.org", 1),
        ("*.*.org", 2),
        ("10.0.0.0/33", 9),
        ("10.0.0.1/8", 0),
        ("10.0.0.0/8x", 10),
        ("10.0.0", 5),
        ("[2001:db8::1", 12),
        ("[2001:dg8::1]", 7),
        ("[2001:db8::1]443", 13),
        ("::ffff:10.0.0.1", 0),
        ("2001:db8::/129", 11),
        ("https://example.org", 6),
        ("icmp/tcp:", 5),
        ("::1:80", 4),
        ("2001:db8::5:443/tcp", 12),
        ("*.b\u{fc}cher.example:443", 3),
        ("a.org bytes=", 12),
        ("a.org bytes=0", 12),
        ("a.org bytes=10m", 12),
        ("a.org bytes=+1", 12),
        ("a.org bytes=16777216T", 12),
        ("a.org at-once=4294967296", 14),
        ("a.org bytes=1 bytes=2", 14),
        ("a.org bytes=1  at-once=2", 14),
        ("a.org  bytes=1", 5),
        ("a.org bytes=1 ", 14),
        ("a.org bytes", 5),
        ("a.org limit=1", 6),
        ("a.org:443 tcp bytes=1", 6),
        ("icmp bytes=1", 5),
    ] {
        let error = text.parse::<Rule>().expect_err(text);
        assert_eq!(error.at, at, "{text}: {error}");
    }
    let error = "example.org:http".parse::<Rule>().unwrap_err();
    assert_eq!(error.caret("example.org:http"), "  example.org:http\n              ^");
    assert!("a".repeat(RULE_MAX + 1).parse::<Rule>().is_err());
}

#[test]
fn error_says_what_to_write_instead() {
    let error = |text: &str| text.parse::<Rule>().unwrap_err().to_string();
    for (text, rule) in [
        ("https://a.example/", "a.example:443"),
        ("https://a.example/path?x#y", "a.example:443"),
        ("http://me:secret@a.example:8080/", "a.example:8080"),
        ("SSH://git@a.example", "a.example:22"),
        ("https://[2001:db8::1]/x", "[2001:db8::1]:443"),
        ("foo://a.example", "a.example"),
        ("B\u{dc}cher.example:443/tcp", "xn--bcher-kva.example:443/tcp"),
        ("*.\u{4f8b}\u{3048}.example", "*.xn--r8jz45g.example"),
        ("::1:80", "[::1]:80"),
        ("2001:db8::5:443", "[2001:db8::5]:443"),
    ] {
        let message = error(text);
        assert!(message.contains(&format!("write {rule}")), "{text}: {message}");
        assert!(rule.parse::<Rule>().is_ok(), "{rule}");
    }
    assert!(error("https:///x").contains("the name alone"));
    assert!(error("a.example/path").contains("no path"));
    for unambiguous in
        ["::1", "2001:db8::1", "1:2:3:4:5:6:7:8", "::1:80/128", "::1:beef", "[::1:80]"]
    {
        assert!(unambiguous.parse::<Rule>().is_ok(), "{unambiguous}");
    }
}

#[test]
fn name_without_ports_excludes_dns_ports() {
    let plain = rule("example.org");
    assert!(plain.covers(443, Protocol::Tcp) && plain.covers(443, Protocol::Udp));
    assert!(!plain.covers(53, Protocol::Udp) && !plain.covers(853, Protocol::Tcp));
    assert!(rule("example.org:853").covers(853, Protocol::Tcp));
    assert!(rule("example.org:*").covers(53, Protocol::Udp));
    assert!(rule("10.0.0.0/8").covers(53, Protocol::Udp));
    assert!(!rule("example.org/tcp").covers(443, Protocol::Udp));
    assert!(!rule("example.org:80-90").covers(443, Protocol::Tcp));
}

proptest! {
    #[test]
    fn error_points_into_the_text(text in "\\PC{0,60}") {
        if let Err(error) = text.parse::<Rule>() {
            prop_assert!(error.at <= text.len(), "{:?}", error);
        }
        crate::fuzzing::rule_text(text.as_bytes());
    }

    #[test]
    fn printed_rule_parses_to_itself(text in "(\\*\\.|\\.)?[a-c0-9:./\\[\\]-]{1,24}(:[0-9,-]{1,9})?(/tcp|/udp)?( (bytes|connections|at-once)=[0-9]{1,20}[KMGT]?){0,3}") {
        if let Ok(rule) = text.parse::<Rule>() {
            prop_assert_eq!(rule.to_string().parse::<Rule>(), Ok(rule));
        }
    }
}
