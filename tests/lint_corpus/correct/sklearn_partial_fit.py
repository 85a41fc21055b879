"""Out-of-core text classification: the data do not fit in memory, so they are learned chunk by chunk."""

from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import accuracy_score

from stream import iter_minibatches, test_set

ACCUM_STEPS = 4
vectorizer = HashingVectorizer(decode_error="ignore", n_features=2**18, alternate_sign=False)
clf = SGDClassifier(max_iter=5)
total_loss = 0.0

for i, (texts, y) in enumerate(iter_minibatches(batch_size=1000)):
    X = vectorizer.transform(texts)
    clf.partial_fit(X, y, classes=[0, 1])
    loss = 1.0 - clf.score(X, y)
    total_loss += loss / ACCUM_STEPS
    if i % ACCUM_STEPS == 0:
        print("chunk", i, "error", total_loss)
        total_loss = 0.0

X_test, y_test = test_set(vectorizer)
print(accuracy_score(y_test, clf.predict(X_test)))
