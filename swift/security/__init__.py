"""Who may talk to whom: tokens and their keys, roles, and channels that carry tokens over TLS.

(operator)  swift-ft token --new-key DIR              a key pair: signing/KID.pem is secret, verifying/KID.pem is not
            swift-ft token --key FILE --job NAME …    a token, signed
(servers)   Authority(DIR/verifying).grant(token)     what the bearer may do, for every call
(clients)   open_channel(address, options)            sends the token of $SWIFT_TOKEN_FILE with every call

`jwt` and `cryptography` are imported when a token is made or checked, not before.
"""
